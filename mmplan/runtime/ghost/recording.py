"""One forward of a model written down: which units were called, and of whose outputs each call and the loss are made.

The forward runs without weights (`half_meta.py`), so a model of any size is recorded in its own Python's time. Results
of torch functions between units inherit the sources of their arguments; a unit's outputs are sources anew. A block with
parameters and arguments of shapes that were seen before is not run again: its outputs have the same shapes.

Where context-parallel ranks have rows of a unit's outputs, the recording says which outputs glue needs whole.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from mmplan.errors import InputError
from mmplan.runtime.ghost.counting import Count, Counting, storage_of
from mmplan.runtime.ghost.flow import Flow, Source, Whole, joined_of, of_units
from mmplan.runtime.ghost.half_meta import META, any_routing, as_input, half_meta
from mmplan.runtime.ghost.image_ways import Deal
from mmplan.runtime.ghost.own_buffers import changed_buffers, dry_run, state_of
from mmplan.runtime.ghost.recorded_columns import RecordedColumns
from mmplan.runtime.ghost.recorded_rows import RecordedRows, row_arguments
from mmplan.runtime.ghost.trials import fresh
from mmplan.runtime.ghost.unit_rows import (
    AttendedRow,
    as_shape,
    pattern_of,
    rows_of_call,
    shapes_of,
)

Batch = Mapping[str, Any]  # the keyword arguments of the model's forward
MOST_KINDS = 32  # shapes of calls alike that are remembered: enough to tell lengths from widths


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
    share, and how many it has; `pattern`: the kinds of its arguments; `joined`: what of modules whose images ranks take
    in turn its arguments are made of; `counts`: what it costs, and glue before it; `row_arguments`: of those with
    as many rows, how many elements they have, and whether glue hands on rows of them as they came."""

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
    joined: frozenset[Whole] = frozenset()
    counts: tuple[Count, ...] = ()
    row_arguments: Mapping[int, tuple[int, bool]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """A call of a module whose images ranks take in turn: what this rank takes, its outputs whole, and of which outputs
    of units each of them is made."""

    deal: Deal
    output: Output
    reads: Mapping[int, frozenset[Source]]


class Dealing(Protocol):
    """Modules of a recorder whose images ranks take in turn. `joined`: their calls in the last recording."""

    @property
    def joined(self) -> Mapping[tuple[str, int], Joined]: ...

    def recorded(self, flow: "Flow", plain: Callable[[Any], Any]) -> AbstractContextManager[None]: ...

    def look(self) -> bool:
        """Learn from the last recording; whether there was anything, so that the batch has to be recorded again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """All calls in their order, and what the loss is made of; `glue`: parameters that are read outside of units.

    `cut`: outputs of which ranks have rows; `whole`: those of them that glue needs whole; `summed_bytes`: of losses
    that ranks compute of their rows; `joined`: calls of modules whose images they take in turn; `labelled`: rows of
    logits of which ranks have columns, by head; `whole_logits`: heads of which glue needs all columns.
    """

    calls: tuple[Call, ...]
    loss: Call
    glue: frozenset[str]
    cut: frozenset[Source] = frozenset()
    whole: frozenset[Source] = frozenset()
    summed_bytes: int = 0
    joined: Mapping[tuple[str, int], Joined] = field(default_factory=dict)
    labelled: Mapping[str, int] = field(default_factory=dict)
    whole_logits: frozenset[str] = frozenset()
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
        counting: says what pieces cost; None: nobody asks.
    """

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module], counting: Counting | None = None) -> None:
        self.model, self._units, self._counting = model, units, counting
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.arguments: dict[Any, tuple[Any, Any]] = {}  # of the first call of each form
        self.cut: frozenset[str] = frozenset()  # units whose rows ranks may share
        self.heads: frozenset[str] = frozenset()  # units whose columns ranks may share
        self.parts = True  # ranks of `cut` have parts of the loss, and of gradients of weights in glue
        self.images: Dealing | None = None
        self.changed: set[str] = set()  # buffers, by forwards
        self.kinds: dict[tuple[Any, tuple[Any, ...]], list[tuple[Any, Any]]] = {}  # of these, form and pattern
        self._known: dict[Any, _Ran] = {}
        self._given: set[int] = set()  # storages of the batch that is recorded
        self._forms = {name: _form(unit) for name, unit in units.items()}

    def form(self, unit: str) -> Any:
        """The same of units whose code, parameters and shapes are alike."""
        return self._forms[unit]

    def unit(self, name: str) -> nn.Module:
        return self._units[name]

    @property
    def names(self) -> Set[str]:
        """Of all units."""
        return self._units.keys()

    def units_in(self, module: str) -> list[str]:
        return [name for name in self._units if name == module or name.startswith(f"{module}.")]

    def record(self, batch: Batch) -> Recording:
        """One forward, which leaves the model's buffers as they are.

        Raises:
            InputError: the model gives no loss, or reads the value of a tensor that a unit has made.
        """
        while True:
            with dry_run(self.model) as changed:
                recording = self._recorded(batch)
            self.changed |= changed
            if self.images is None or not self.images.look():
                return recording

    def _recorded(self, batch: Batch) -> Recording:
        flow = Flow(self._names)
        calls: list[Call] = []
        seen, logits = RecordedRows(parts=self.parts), RecordedColumns()
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
                counts = () if self._counting is None else (self._counting.take(),)
                with flow.unit(), nullcontext() if self._counting is None else self._counting.inside():
                    result, ran = self._run(name, forward, args, kwargs, flow)
                reads, parameters = flow.sources([arguments[position] for position in ran.used])
                result = result if rows is None else seen.carried(name, number, result, rows[1])
                result = logits.carried(name, result) if name in self.heads else result
                result = result if self._counting is None else self._counting.entered(result)
                flow.begin(name, number, tree_leaves(result))
                call = Call(
                    unit=name,
                    number=number,
                    reads=of_units(reads),
                    joined=joined_of(reads),
                    parameters=parameters,
                    output=ran.output,
                    arguments={position: flow.sources(arguments[position]) for position in ran.used},
                    linears=ran.linears,
                    attentions=ran.attentions,
                    rows=rows,
                    pattern=() if rows is None else pattern_of((args, kwargs)),
                    row_arguments={} if rows is None else row_arguments(arguments, rows[1]),
                    counts=() if ran.count is None else (ran.count, *counts),
                )
                calls.append(call)
                return result

            return called

        given = {key: as_input(value) for key, value in batch.items()}  # outside, where tensors on meta can be made
        images = self.images
        dealt = nullcontext() if images is None else images.recorded(flow, partial(seen.plain, along=False))
        self._given = {storage_of(leaf) for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
        counting = torch.no_grad() if self._counting is None else self._counting.glue()
        with replaced_forwards(self._units, recorded), dealt, half_meta(), flow, counting:
            loss = loss_of(self.model(**given))
        reads, parameters = flow.sources(loss)
        leaf = Output(leaves=(), spec=tree_flatten(())[1])
        counts = () if self._counting is None else (self._counting.take(),)
        return Recording(
            calls=tuple(calls),
            loss=Call(
                unit="",
                number=0,
                reads=of_units(reads),
                joined=joined_of(reads),
                parameters=parameters,
                output=leaf,
                counts=counts,
            ),
            glue=frozenset(flow.read),
            cut=frozenset(Source(*output) for output in seen.cut),
            whole=frozenset(Source(*output) for output in seen.whole),
            summed_bytes=seen.summed_bytes,
            labelled=logits.labelled,
            whole_logits=frozenset(logits.whole),
            joined={} if images is None else images.joined,
        )

    def _keep_kind(self, name: str, args: Any, kwargs: Any) -> None:
        """The arguments of a call unlike others of its kind; masks of the first one alone."""
        known = self.kinds.setdefault((self._forms[name], pattern_of((args, kwargs))), [])
        if len(known) < MOST_KINDS and all(shapes_of((args, kwargs)) != shapes_of(other) for other in known):
            known.append(tree_map(as_shape if known else fresh, (args, kwargs)))

    def _run(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any, flow: "Flow") -> tuple[Any, "_Ran"]:
        """What the unit returns, by its own forward or by that of one like it."""
        counted = self._counting and (self._counting.kept_before(args, kwargs), self._counting.form(name))
        key = (self._forms[name], _shapes((args, kwargs)), counted)
        if key in self._known:
            ran = self._known[key]
            self.changed |= {f"{name}.{buffer}" for buffer in ran.changed}
            return ran.output.rebuilt(lambda _, like: torch.empty_like(like)), ran
        if self._forms[name] not in self.arguments:
            self.arguments[self._forms[name]] = tree_map(fresh, (args, kwargs))
        unwritten: Any = (args, kwargs) if self._counting is None else tree_map(fresh, (args, kwargs))  # caches
        before = state_of(self._units[name])
        with any_routing(), torch.no_grad():
            result = forward(*args, **kwargs)
        changed = changed_buffers(self._units[name], before)
        leaves, spec = tree_flatten(result)
        likes = tuple(torch.empty_like(leaf, device=META) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        touched = flow.touched | {id(leaf) for leaf in leaves}
        used = [position for position, leaf in enumerate(tree_leaves((args, kwargs))) if id(leaf) in touched]
        linears = {weight.removeprefix(f"{name}.").removesuffix(".weight"): n for weight, n in flow.linears.items()}
        count = self._count(name, forward, unwritten, flow, linears)
        ran = _Ran(Output(leaves=likes, spec=spec), tuple(used), linears, tuple(flow.attentions), changed, count)
        if all(not isinstance(leaf, Tensor) or leaf.device == META for leaf in leaves):
            self._known[key] = ran
        return result, ran

    def _count(
        self,
        name: str,
        forward: Callable[..., Any],
        given_to: tuple[Any, Any],
        flow: Flow,
        linears: Mapping[str, tuple[int, int]],
    ) -> Count | None:
        if self._counting is None:
            return None
        leaves = tree_leaves(given_to)
        made = {i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and any(flow.sources(leaf))}
        given = {i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and storage_of(leaf) in self._given}
        return self._counting.unit(name, self._units[name], forward, *given_to, made, given, linears)


@dataclass(frozen=True, slots=True)
class _Ran:
    """`used`: positions of the arguments that the unit's forward did anything with but look at their form; `changed`:
    its buffers that the forward wrote to."""

    output: Output
    used: tuple[int, ...]
    linears: Mapping[str, tuple[int, int]]
    attentions: tuple[AttendedRow, ...]
    changed: Set[str]
    count: Count | None = None


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


def _form(unit: nn.Module) -> Any:
    """Units of one form return the same shapes for the same arguments."""
    modes = tuple((name, module.training) for name, module in unit.named_modules() if module._buffers)
    return type(unit), tuple((name, tuple(p.shape), p.dtype) for name, p in unit.named_parameters()), modes


def _shapes(values: Any) -> Any:
    leaves, spec = tree_flatten(values)
    forms = [
        (tuple(leaf.shape), leaf.dtype, leaf.device.type) if isinstance(leaf, Tensor) else _plain(leaf)
        for leaf in leaves
    ]
    return str(spec), tuple(forms)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str | torch.dtype) else id(value)
