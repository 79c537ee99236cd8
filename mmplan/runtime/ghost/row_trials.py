"""How the units of a language model run on the rows of a context-parallel rank: found by structure, kept if a trial is
right.

One unit of each form, and each kind of arguments, is run whole and on each rank's rows, with drawn weights, on the
shapes of a recorded microbatch: outputs and the sums of all gradients have to agree. What mixes rows otherwise than by
`scaled_dot_product_attention` is refused with its line.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from mmplan.errors import InputError
from mmplan.runtime.context import OwnRowsOf
from mmplan.runtime.failure import calling_line
from mmplan.runtime.ghost.cut_rows import Follow
from mmplan.runtime.ghost.half_meta import META
from mmplan.runtime.ghost.own_rows import Attention, RowRanks, RowWay, cut, on_own_rows
from mmplan.runtime.ghost.recording import Call, Recorder
from mmplan.runtime.ghost.trials import (
    TOLERANCE,
    DrawsNumbersError,
    Results,
    drawn,
    drawn_block,
    first_difference,
    is_float,
    run_drawn,
    settings,
)
from mmplan.runtime.ghost.unit_rows import attended, has_rows
from mmplan.runtime.network import all_reduce, gather_text


class RowWays:
    """Of the units of one rank's model (see `RowsOfUnits`). Args: recorder: of a model without weights."""

    def __init__(self, recorder: Recorder, ranks: RowRanks, device: torch.device) -> None:
        self.ranks, self._recorder, self._device = ranks, recorder, device
        self._ways: dict[Any, RowWay] = {}
        self._forms: dict[str, Any] = {}
        self._follows: dict[int, Follow] = {}  # by length

    @property
    def loss_parts(self) -> int:
        return self.ranks.peers.degree

    def of(self, call: Call) -> RowWay:
        return self._ways[self._key(call)]

    def size(self, rows: int) -> int:
        return 2 * self.ranks.own(rows).size

    def on_own(
        self, call: Call, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Callable[..., Any], Any, Any]:
        assert call.rows is not None
        return on_own_rows(forward, args, kwargs, self.of(call), call.rows[1], self.ranks)

    def whole(self, x: Tensor, rows: int) -> Tensor:
        return self.ranks.whole(x, rows)

    def follow(self, rows: int) -> Follow:
        """What glue does with outputs of so many rows."""
        if rows not in self._follows:
            place = self.ranks.place(rows, self._device)
            self._follows[rows] = Follow(place=place, whole=_unforeseen, total=self.ranks.total)
        return self._follows[rows]

    def look(self, calls: Iterable[Call]) -> None:
        """Try what calls have that none before had. Collective over the ranks with other rows.

        Raises:
            InputError: a unit mixes rows.
        """
        for call in calls:
            if call.rows is not None and self._key(call) not in self._ways:
                self._ways[self._key(call)] = self._tried(call)

    def _key(self, call: Call) -> Any:
        if call.unit not in self._forms:
            self._forms[call.unit] = settings(self._recorder.unit(call.unit))
        return self._recorder.form(call.unit), self._forms[call.unit], call.pattern

    def _tried(self, call: Call) -> RowWay:
        known = self._recorder.kinds[self._recorder.form(call.unit), call.pattern]
        ranks = self.ranks.ranks
        counted = ranks.forward_bytes, ranks.backward_bytes
        try:
            trial = _Trial(self._recorder.unit(call.unit), call, known, self.ranks, self._device)
            reasons = []
            for dims in trial.dims():
                way, reason = trial.differs(dims)
                if reason is None:
                    return way
                reasons.append(reason)
        except DrawsNumbersError:
            reasons = ["it draws random numbers (dropout), which each rank would draw for itself"]
        finally:
            ranks.forward_bytes, ranks.backward_bytes = counted
        raise InputError(
            f"the plan has cp={self.ranks.peers.degree}, and '{call.unit}' cannot be run on some rows of a sequence: "
            f"{reasons[0]}: {_other_attention(self._recorder.unit(call.unit))}set `constraints.cp: [1]` in the "
            "scenario and optimize again"
        )


def _other_attention(block: nn.Module) -> str:
    """What to do where a block's attention is not torch's function, which alone is seen; empty where it is."""
    ways = [getattr(getattr(part, "config", None), "_attn_implementation", "sdpa") for part in block.modules()]
    if other := next((way for way in ways if way not in (None, "sdpa")), None):
        return f'its attention is "{other}": make the model with `attn_implementation="sdpa"`, or '
    if any(isinstance(part, nn.MultiheadAttention) for part in block.modules()):
        return "call torch's `scaled_dot_product_attention` instead of `nn.MultiheadAttention`, or "
    return ""


def _unforeseen() -> None:
    raise ValueError("glue needs rows of other ranks, which its recording did not foresee")


class _Trial:
    """Of one unit. Args: known: arguments of calls alike, the first with values where they are known."""

    def __init__(
        self, block: nn.Module, call: Call, known: Sequence[tuple[Any, Any]], ranks: RowRanks, device: torch.device
    ) -> None:
        assert call.rows is not None
        self._call, self._known, self._ranks, self._device = call, known, ranks, device
        self._args, self._kwargs = known[0]
        self._at = call.rows[0]
        self._rows = tree_leaves(known[0])[self._at].shape[-2]
        self._own = ranks.own(self._rows)
        self._block = drawn_block(block, device, lambda _, value: value)
        self._seen = _Attentions(self._block)
        whole = run_drawn(self._block, self._watched, self._args, self._kwargs, device)
        assert not isinstance(whole, str), f"{call.unit} fails alone: {whole}"
        self._whole: Results = whole

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        self._seen.begin(tree_leaves((args, kwargs)))
        with self._seen:
            return self._block(*args, **kwargs)

    def dims(self) -> Iterator[dict[int, tuple[int, ...]]]:
        """Dims of arguments that the sequence may lie along: all of its length in all calls, then one of each."""
        every = [self._dims_of(position) for position in range(len(tree_leaves(self._known[0])))]
        found = {position: dims for position, dims in enumerate(every) if dims}
        yield found
        if any(len(dims) > 1 for dims in found.values()):
            yield {position: dims[:1] for position, dims in found.items()}

    def _dims_of(self, position: int) -> tuple[int, ...]:
        """Of what units have made, the last but one alone; calls alike may not use the same arguments."""
        first = tree_leaves(self._known[0])[position]
        reads, _ = self._call.arguments.get(position, (is_float(first) and first.device == META, ()))
        dims = range(-first.dim(), 0) if isinstance(first, Tensor) else ()
        alike = [(leaves[position], leaves[self._at].shape[-2]) for leaves in map(tree_leaves, self._known)]
        return tuple(
            dim for dim in dims if (dim == -2 or not reads) and all(leaf.shape[dim] == rows for leaf, rows in alike)
        )

    def differs(self, dims: Mapping[int, tuple[int, ...]]) -> tuple[RowWay, str | None]:
        """The way that so cuts the arguments, and why the unit is another one; the same on all ranks."""
        attentions = [seen.attention(dims) for seen in self._seen.found]
        way = RowWay(dims=dims, attentions=tuple(attentions))
        own_mask = next(
            (s for s, a in zip(self._seen.found, attentions, strict=True) if a.over_rows and s.unknown), None
        )
        if own_mask is not None:
            return way, f"the mask of its attention is made inside, in {own_mask.line}"
        shapes = {name: value.shape for name, value in self._whole}

        def weight(name: str, _: Tensor) -> Tensor:
            value = drawn(name, shapes[name], self._device)
            whole = value / self._ranks.peers.degree  # computed alike on all ranks
            return cut(value, (-2,), self._own) if has_rows(value, self._rows) else whole

        found = run_drawn(self._block, self._cut(way, self._block), self._args, self._kwargs, self._device, weight)
        if self._any(isinstance(found, str)):
            return way, self._mixes(way) or (found if isinstance(found, str) else "it fails on another rank")
        assert not isinstance(found, str)
        expected = [(name, self._part(value) if "output" in name else value) for name, value in self._whole]
        got = [
            (name, self._valid(value, whole) if "output" in name else self._summed(value))
            for (name, value), (_, whole) in zip(found, self._whole, strict=True)
        ]
        reason = first_difference(expected, got)
        if self._any(reason is not None):
            return way, self._mixes(way) or reason or "another rank's rows differ"
        return way, None

    def _cut(self, way: RowWay, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            on_rows, args, kwargs = on_own_rows(forward, args, kwargs, way, self._rows, self._ranks)
            return on_rows(*args, **kwargs)

        return run

    def _part(self, whole: Tensor) -> Tensor:
        mine, _ = self._own.among(torch.arange(self._rows, device=self._device))
        return whole.index_select(-2, mine) if has_rows(whole, self._rows) else whole

    def _valid(self, local: Tensor, whole: Tensor) -> Tensor:
        _, at = self._own.among(torch.arange(self._rows, device=self._device))
        fits = has_rows(whole, self._rows) and local.dim() > 1 and local.shape[-2] == 2 * self._own.size
        return local.index_select(-2, at) if fits else local

    def _summed(self, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        all_reduce(total, self._ranks.peers.group)
        return total

    def _any(self, failed: bool) -> bool:
        flag = torch.tensor([failed], dtype=torch.int32, device=self._device)
        all_reduce(flag, self._ranks.peers.group, dist.ReduceOp.MAX)
        return bool(flag.item())

    def _mixes(self, way: RowWay) -> str | None:
        """The first line whose result is not the rank's rows of the whole one. Collective."""
        whole, part = _Log(), _Log()
        run_drawn(self._block, whole.around(self._block), self._args, self._kwargs, self._device)
        run_drawn(self._block, self._cut(way, part.around(self._block)), self._args, self._kwargs, self._device)
        lines = [
            None if line is None else f"rows are mixed in {line}" for line in [_first_mixed(whole, part, self._own)]
        ]
        told = gather_text(lines[0], self._ranks.peers.group)
        return next((line for line in told if line is not None), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """An attention of a unit as it runs whole. `unknown`: it has a mask, and no argument is that; `line`: its call."""

    made_of: frozenset[str | int]
    keys_of: frozenset[str | int]
    mask: int | None
    unknown: bool
    line: str

    def attention(self, dims: Mapping[int, Any]) -> Attention:
        over_rows = bool(self.keys_of & dims.keys())
        mask = self.mask if over_rows else None
        return Attention(over_rows=over_rows, mask=mask, made_of=self.made_of, keys_of=self.keys_of)


class _Attentions(TorchFunctionMode):
    """Follows parameters and arguments into attentions."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._parameters = {id(p): frozenset[str | int]({name}) for name, p in block.named_parameters()}

    def begin(self, arguments: Sequence[Any]) -> None:
        self.found: list[_Seen] = []
        self._arguments = list(arguments)
        self._of = dict(self._parameters)
        self._of |= {id(leaf): frozenset({i}) for i, leaf in enumerate(arguments) if isinstance(leaf, Tensor)}
        self._alive: list[Any] = []  # an id is a tensor's own only while it lives

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, used = func(*args, **kwargs), self._used((args, kwargs))
        if func is F.scaled_dot_product_attention:
            self._see(args, kwargs)
        name = getattr(func, "__name__", "")
        written = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")
        for leaf in tree_leaves((result, args[0]) if written else result):
            if isinstance(leaf, Tensor) and used:
                self._of[id(leaf)] = self._of.get(id(leaf), frozenset()) | used
                self._alive.append(leaf)
        return result

    def _see(self, args: Any, kwargs: Any) -> None:
        query, key, value = attended(args, kwargs)
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        same = [
            position
            for position in sorted(self._used(mask), key=str)
            if isinstance(position, int) and _equal(mask, self._arguments[position])
        ]
        self.found.append(
            _Seen(
                made_of=self._used((query, key, value)),
                keys_of=self._used((key, value)),
                mask=same[0] if same else None,
                unknown=mask is not None and not same,
                line=calling_line(),
            )
        )

    def _used(self, values: Any) -> frozenset[str | int]:
        return frozenset[str | int]().union(*(self._of.get(id(leaf), frozenset()) for leaf in tree_leaves(values)))


def _equal(mask: Tensor, argument: Tensor) -> bool:
    return mask.shape == argument.shape and torch.equal(mask, argument.to(mask.dtype))


class _Log(TorchFunctionMode):
    """What every torch function of a forward returned, and in which line."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, str, list[Tensor]]] = []

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, line = getattr(func, "__name__", ""), calling_line()
        self.entries.append((name, line, []))  # also where it fails
        result = func(*args, **(kwargs or {}))
        self.entries[-1][2].extend(leaf.detach().clone() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


def _first_mixed(whole: _Log, part: _Log, own: OwnRowsOf) -> str | None:
    """The first line where a rank has something else than its rows."""
    for (name, line, results), (other, _, found) in zip(whole.entries, part.entries, strict=False):
        if name != other or len(results) != len(found):
            return line
        if not all(_are_rows(a, b, own) for a, b in zip(results, found, strict=True)):
            return line
    return whole.entries[len(part.entries)][1] if len(part.entries) < len(whole.entries) else None


def _are_rows(whole: Tensor, part: Tensor, own: OwnRowsOf) -> bool:
    """Whether a result is the rank's rows along every dim that is longer whole, sequences side by side included."""
    if whole.dim() != part.dim():
        return False
    mine, at = own.among(torch.arange(own.count, device=whole.device))
    for dim, (size, length) in enumerate(zip(whole.shape, part.shape, strict=True)):
        if size == length:
            continue
        many, rest = divmod(size, own.count)
        if rest or length != many * 2 * own.size:
            return False
        whole = torch.unflatten(whole, dim, (many, own.count)).index_select(dim + 1, mine).flatten(dim, dim + 1)
        part = torch.unflatten(part, dim, (many, 2 * own.size)).index_select(dim + 1, at).flatten(dim, dim + 1)
    if torch.equal(whole, part) or not whole.is_floating_point():
        return torch.equal(whole, part)
    return float((whole - part).abs().max()) <= 100 * TOLERANCE * max(1e-3, float(whole.abs().max()))
