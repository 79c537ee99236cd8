"""One forward of a model written down: which units were called, and of whose outputs each call and the loss are made.

The forward runs without weights (`half_meta.py`), so a model of any size is recorded in its own Python's time. Results
of torch functions between units inherit the sources of their arguments; a unit's outputs are sources anew. A block with
parameters and arguments of shapes that were seen before is not run again: its outputs have the same shapes.

Where context-parallel ranks have rows of a unit's outputs, the recording says which outputs glue needs whole.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from mmplan.errors import InputError
from mmplan.runtime.ghost.half_meta import META, any_routing, as_input, half_meta
from mmplan.runtime.ghost.recorded_rows import RecordedRows
from mmplan.runtime.ghost.trials import fresh
from mmplan.runtime.ghost.unit_rows import (
    AttendedRow,
    as_shape,
    attended_row,
    pattern_of,
    rows_of_call,
    shapes_of,
)

Batch = Mapping[str, Any]  # the keyword arguments of the model's forward
MOST_KINDS = 32  # shapes of calls alike that are remembered: enough to tell lengths from widths
_READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy"}
_LOOKS = {"__get__", "size", "dim", "numel", "is_floating_point", "stride", "data_ptr"}  # at a tensor's form alone
_LIKE_FIRST = {"zeros_like", "ones_like", "empty_like", "full_like"} | {  # of the first argument its form alone
    f"new_{name}" for name in ("zeros", "ones", "empty", "full", "tensor")
}
_LIKE_SECOND = {"expand_as", "view_as", "reshape_as", "type_as"}


@dataclass(frozen=True, slots=True, order=True)
class Source:
    """Leaf `slot` of what the call number `call` of a unit returned."""

    unit: str
    call: int
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """The form of what a unit returned: leaves in the order of torch's pytree, tensors without storage."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    def rebuilt(self, tensor_of: Callable[[int, Tensor], Tensor]) -> Any:
        """The same form with `tensor_of(slot, like)` in place of each tensor."""
        leaves = [tensor_of(i, leaf) if isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(self.leaves)]
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """`reads`: outputs of other units that its arguments are made of; `parameters`: those read by glue on the way;
    `arguments`: both of each argument that it uses, by position; `linears`: elements that linear layers inside take and
    give, by their names there; `attentions`: rows at each attention inside; `rows`: the argument whose rows ranks may
    share, and how many it has; `pattern`: the kinds of its arguments."""

    unit: str
    number: int
    reads: frozenset[Source]
    parameters: frozenset[str]
    output: Output
    arguments: Mapping[int, tuple[frozenset[Source], frozenset[str]]] = field(default_factory=dict)
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    attentions: tuple[AttendedRow, ...] = ()
    rows: tuple[int, int] | None = None
    pattern: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """All calls in their order, and what the loss is made of; `glue`: parameters that are read outside of units.

    `cut`: outputs of which ranks have rows; `whole`: those of them that glue needs whole; `summed_bytes`: of losses
    that ranks compute of their rows.
    """

    calls: tuple[Call, ...]
    loss: Call
    glue: frozenset[str]
    cut: frozenset[Source] = frozenset()
    whole: frozenset[Source] = frozenset()
    summed_bytes: int = 0
    of: Mapping[tuple[str, int], Call] = field(init=False)
    outputs: Mapping[tuple[str, int], Output] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", {(call.unit, call.number): call for call in self.calls})
        object.__setattr__(self, "outputs", {key: call.output for key, call in self.of.items()})

    @property
    def apart(self) -> frozenset[Source]:
        """Outputs of which each rank keeps its rows."""
        return self.cut - self.whole

    def like(self, source: Source) -> Tensor:
        """A tensor of that shape and type, without storage."""
        leaf = self.outputs[source.unit, source.call].leaves[source.slot]
        assert isinstance(leaf, Tensor)
        return leaf


class Recorder:
    """Records forwards of one model, whose parameters have no storage; remembers the shapes of blocks.

    Args:
        units: as `units.py` finds them.
    """

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        self._model, self._units = model, units
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.arguments: dict[Any, tuple[Any, Any]] = {}  # of the first call of each form
        self.cut: frozenset[str] = frozenset()  # units whose rows ranks may share
        self.kinds: dict[tuple[Any, tuple[Any, ...]], list[tuple[Any, Any]]] = {}  # of these, form and pattern
        self._known: dict[Any, _Ran] = {}
        self._forms = {name: _form(unit) for name, unit in units.items()}

    def form(self, unit: str) -> Any:
        """The same of units whose code, parameters and shapes are alike."""
        return self._forms[unit]

    def unit(self, name: str) -> nn.Module:
        return self._units[name]

    def record(self, batch: Batch) -> Recording:
        """One forward.

        Raises:
            InputError: the model gives no loss, or reads the value of a tensor that a unit has made.
        """
        flow = _Flow(self._names)
        calls: list[Call] = []
        seen = RecordedRows()
        numbers = dict.fromkeys(self._units, 0)

        def recorded(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                if flow.inside:
                    return forward(*args, **kwargs)
                number = numbers[name]
                numbers[name] += 1
                arguments = tree_leaves((args, kwargs))
                rows = rows_of_call(arguments, flow.sources) if name in self.cut else None
                args, kwargs = seen.plain((args, kwargs), along=rows is not None)
                if rows is not None:
                    self._keep_kind(name, args, kwargs)
                with flow.unit():
                    result, ran = self._run(name, forward, args, kwargs, flow)
                reads, parameters = flow.sources([arguments[position] for position in ran.used])
                result = result if rows is None else seen.carried(name, number, result, rows[1])
                flow.begin(name, number, tree_leaves(result))
                call = Call(
                    unit=name,
                    number=number,
                    reads=reads,
                    parameters=parameters,
                    output=ran.output,
                    arguments={position: flow.sources(arguments[position]) for position in ran.used},
                    linears=ran.linears,
                    attentions=ran.attentions,
                    rows=rows,
                    pattern=() if rows is None else pattern_of((args, kwargs)),
                )
                calls.append(call)
                return result

            return called

        given = {key: as_input(value) for key, value in batch.items()}  # outside, where tensors on meta can be made
        with replaced_forwards(self._units, recorded), torch.no_grad(), half_meta(), flow:
            loss = loss_of(self._model(**given))
        reads, parameters = flow.sources(loss)
        leaf = Output(leaves=(), spec=tree_flatten(())[1])
        return Recording(
            calls=tuple(calls),
            loss=Call(unit="", number=0, reads=reads, parameters=parameters, output=leaf),
            glue=frozenset(flow.read),
            cut=frozenset(Source(*output) for output in seen.cut),
            whole=frozenset(Source(*output) for output in seen.whole),
            summed_bytes=seen.summed_bytes,
        )

    def _keep_kind(self, name: str, args: Any, kwargs: Any) -> None:
        """The arguments of a call unlike others of its kind; masks of the first one alone."""
        known = self.kinds.setdefault((self._forms[name], pattern_of((args, kwargs))), [])
        if len(known) < MOST_KINDS and all(shapes_of((args, kwargs)) != shapes_of(other) for other in known):
            known.append(tree_map(as_shape if known else fresh, (args, kwargs)))

    def _run(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any, flow: "_Flow") -> tuple[Any, "_Ran"]:
        """What the unit returns, by its own forward or by that of one like it."""
        key = (self._forms[name], _shapes((args, kwargs)))
        if key in self._known:
            ran = self._known[key]
            return ran.output.rebuilt(lambda _, like: torch.empty_like(like)), ran
        if self._forms[name] not in self.arguments:
            self.arguments[self._forms[name]] = tree_map(fresh, (args, kwargs))
        with any_routing():
            result = forward(*args, **kwargs)
        leaves, spec = tree_flatten(result)
        likes = tuple(torch.empty_like(leaf, device=META) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        touched = flow.touched | {id(leaf) for leaf in leaves}
        used = [position for position, leaf in enumerate(tree_leaves((args, kwargs))) if id(leaf) in touched]
        linears = {weight.removeprefix(f"{name}.").removesuffix(".weight"): n for weight, n in flow.linears.items()}
        ran = _Ran(Output(leaves=likes, spec=spec), tuple(used), linears, tuple(flow.attentions))
        if all(not isinstance(leaf, Tensor) or leaf.device == META for leaf in leaves):
            self._known[key] = ran
        return result, ran


@dataclass(frozen=True, slots=True)
class _Ran:
    """`used`: positions of the arguments that the unit's forward did anything with but look at their form."""

    output: Output
    used: tuple[int, ...]
    linears: Mapping[str, tuple[int, int]]
    attentions: tuple[AttendedRow, ...]


@contextmanager
def replaced_forwards(
    units: Mapping[str, nn.Module], replacement: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """`unit.forward` replaced on the instances, so that hooks and wrappers of the classes go on working."""
    own: dict[str, Any] = {name: unit.__dict__.get("forward") for name, unit in units.items()}
    try:
        for name, unit in units.items():
            unit.forward = replacement(name, unit.forward)
        yield
    finally:
        for name, unit in units.items():
            if own[name] is None:
                unit.__dict__.pop("forward", None)
            else:
                unit.forward = own[name]


def loss_of(result: Any) -> Tensor:
    """The loss in what a forward returned: `result.loss`, `result["loss"]`, a tuple's first, or the tensor itself.

    Raises:
        InputError: there is none, or it is no single number.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(result, tuple) and result and not isinstance(loss, Tensor):
        loss = result[0]
    loss = result if isinstance(result, Tensor) else loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else "none"
        raise InputError(
            f"the model's forward has to return a loss, one number, as `.loss` or as its first value; found {found}: "
            "do the batches hold what the loss is computed of (labels)?"
        )
    return loss


class _Flow(TorchFunctionMode):
    """Follows tensors through glue: which outputs of units, and which parameters, each is made of."""

    def __init__(self, parameters: Mapping[int, str]) -> None:
        super().__init__()
        self.inside = False
        self.touched: set[int] = set()  # by the unit that runs
        self.linears: dict[str, tuple[int, int]] = {}  # weight -> elements of input and output, in that unit
        self.attentions: list[AttendedRow] = []  # in that unit
        self.read: set[str] = set()  # parameters, by glue
        self._parameters = parameters
        self._of: dict[int, tuple[frozenset[Source], frozenset[str]]] = {}
        self._alive: list[Any] = []  # an id is a tensor's own only while it lives

    @contextmanager
    def unit(self) -> Iterator[None]:
        self.inside, self.touched, self.linears, self.attentions = True, set(), {}, []
        try:
            yield
        finally:
            self.inside = False

    def begin(self, unit: str, number: int, leaves: list[Any]) -> None:
        """The outputs of a call are made of nothing else."""
        for slot, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._keep(leaf, (frozenset({Source(unit, number, slot)}), frozenset()))

    def sources(self, values: Any) -> tuple[frozenset[Source], frozenset[str]]:
        """Of all tensors in some values together."""
        reads: frozenset[Source] = frozenset()
        parameters: frozenset[str] = frozenset()
        for leaf in tree_leaves(values):
            if id(leaf) in self._of:
                more, others = self._of[id(leaf)]
                reads, parameters = reads | more, parameters | others
            if id(leaf) in self._parameters:
                parameters |= {self._parameters[id(leaf)]}
        return reads, parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.inside:
            if name not in _LOOKS:
                self.touched |= {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            result = func(*args, **kwargs)
            if func is F.linear and len(args) > 1 and id(args[1]) in self._parameters:
                self.linears[self._parameters[id(args[1])]] = args[0].numel(), result.numel()
            if func is F.scaled_dot_product_attention:
                self.attentions.append(attended_row(args, kwargs, result))
            return result
        valued = args[1:] if name in _LIKE_FIRST else args[:1] if name in _LIKE_SECOND else args
        reads, parameters = self.sources((valued, kwargs))
        if name not in _LOOKS:
            self.read |= parameters & {self._parameters.get(id(leaf)) for leaf in tree_leaves((args, kwargs))}
        if reads and name in _READS:
            raise InputError(_told_read(name, reads))
        result = func(*args, **kwargs)
        if not (reads or parameters):
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf, reads, parameters)
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i"):
            for changed in (args[0], getattr(args[0], "_base", None)):
                if isinstance(changed, Tensor):
                    self._add(changed, reads, parameters)
        return result

    def _add(self, tensor: Tensor, reads: frozenset[Source], parameters: frozenset[str]) -> None:
        known = self._of.get(id(tensor), (frozenset(), frozenset()))
        self._keep(tensor, (known[0] | reads, known[1] | parameters))

    def _keep(self, tensor: Tensor, sources: tuple[frozenset[Source], frozenset[str]]) -> None:
        self._of[id(tensor)] = sources
        self._alive.append(tensor)


def _told_read(name: str, reads: frozenset[Source]) -> str:
    """Where in the model's code a value is read that another stage may have to compute."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "torch" in Path(frame.f_code.co_filename).parts:
        frame = frame.f_back
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"
    units = ", ".join(sorted({source.unit for source in reads})[:3])
    return f"{place}: `{name}` reads the value of a tensor that {units} computes; another stage cannot know it"


def _form(unit: nn.Module) -> Any:
    """Units of one form return the same shapes for the same arguments."""
    return type(unit), tuple((name, tuple(p.shape), p.dtype) for name, p in unit.named_parameters())


def _shapes(values: Any) -> Any:
    leaves, spec = tree_flatten(values)
    forms = [
        (tuple(leaf.shape), leaf.dtype, leaf.device.type) if isinstance(leaf, Tensor) else _plain(leaf)
        for leaf in leaves
    ]
    return str(spec), tuple(forms)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str | torch.dtype) else id(value)
