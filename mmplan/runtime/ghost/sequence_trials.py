"""Which units of a language model run on a tensor-parallel rank's rows, and how: found by structure, kept if a trial is
right.

One unit of each form, and each kind of arguments, is run whole and by all ranks on their rows, with drawn weights, on
the shapes of a recorded microbatch: outputs and all gradients have to agree. A unit that does not is run on all rows by
every rank, as without sequence parallelism, and told.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mmplan.errors import InputError
from mmplan.runtime.ghost.cut_rows import Follow
from mmplan.runtime.ghost.half_meta import any_routing, half_meta
from mmplan.runtime.ghost.linear_flow import LinearFlow
from mmplan.runtime.ghost.recording import Call, Recorder, replaced_forwards
from mmplan.runtime.ghost.sequence_linears import AtWork, RowsOf, SequenceWay, on_sequence_rows, set_up_rows
from mmplan.runtime.ghost.split_linears import Split, cuts_of
from mmplan.runtime.ghost.trials import Results, drawn, drawn_block, first_difference, fresh, is_float, run_drawn
from mmplan.runtime.ghost.trials import settings as settings_of
from mmplan.runtime.ghost.unit_rows import has_rows
from mmplan.runtime.network import all_reduce


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A way, the parameters within the unit whose gradients are summed, and layers that keep a rank's rows alone."""

    way: SequenceWay
    summed: frozenset[str]
    kept_own: frozenset[str]


class SequenceWays:
    """Of the units of one rank's model (see `RowsOfUnits`). Args: splits: of units, what ranks share."""

    def __init__(
        self, recorder: Recorder, splits: Mapping[str, Sequence[Split]], ranks: RowsOf, device: torch.device
    ) -> None:
        self.ranks, self._recorder, self._splits, self._device = ranks, recorder, splits, device
        self._tried: dict[Any, Tried | str] = {}
        self._forms: dict[str, Any] = {}
        self._follows: dict[int, Follow] = {}  # by length
        self._at: dict[str, AtWork] = {}

    @property
    def loss_parts(self) -> int:
        return 1  # every rank computes the loss of all rows

    def of(self, call: Call) -> Tried:
        tried = self._tried[self._key(call)]
        assert isinstance(tried, Tried)
        return tried

    def size(self, rows: int) -> int:
        return self.ranks.own(rows).size

    def whole(self, x: Tensor, rows: int) -> Tensor:
        return self.ranks.whole(x, rows)

    def on_own(
        self, call: Call, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Callable[..., Any], Any, Any]:
        assert call.rows is not None
        return on_sequence_rows(forward, args, kwargs, self.of(call).way, call.rows[1], self._at[call.unit])

    def follow(self, rows: int) -> Follow:
        if rows not in self._follows:
            place = self.ranks.place(rows, self._device)
            self._follows[rows] = Follow(place=place, whole=_unforeseen, total=None)
        return self._follows[rows]

    def set_up(self, unit: nn.Module, name: str) -> None:
        """Let a unit of the model run so."""
        self._at[name] = AtWork(self.ranks)
        splits = self._splits[name]
        whole = dict(unit.named_parameters()).keys() - cuts_of(unit, splits, self.ranks.ranks.degree).keys()
        set_up_rows(unit, splits, whole, self._at[name])

    def shared(self, name: str) -> frozenset[str]:
        """Linear layers within a unit of which every rank has the whole, and a part of the gradient."""
        parts = {layer for split in self._splits[name] for layer in (*split.pair.columns, split.pair.row)}
        unit = self._recorder.unit(name)
        return frozenset(key for key, part in unit.named_modules() if isinstance(part, nn.Linear) and key not in parts)

    def first_look(self, calls: Iterable[Call]) -> dict[str, str]:
        """Units that do not run so, with the reason. Collective over the ranks."""
        refused = {}
        for call in calls:
            if call.rows is not None and call.unit not in refused:
                tried = self._try(call)
                if isinstance(tried, str):
                    refused[call.unit] = tried
        return refused

    def look(self, calls: Iterable[Call]) -> None:
        """See `RowsOfUnits`.

        Raises:
            InputError: a unit does not run so any more.
        """
        for call in calls:
            if call.rows is not None and isinstance(reason := self._try(call), str):
                raise InputError(
                    f"'{call.unit}' ran on some rows of a sequence, and does not with the arguments that it has now: "
                    f"{reason}: write `sequence_parallel: false` in the constraints of the scenario and optimize again"
                )

    def _form(self, unit: str) -> Any:
        if unit not in self._forms:
            split = tuple((one.pair.columns, one.pair.row) for one in self._splits[unit])
            self._forms[unit] = self._recorder.form(unit), (settings_of(self._recorder.unit(unit)), split)
        return self._forms[unit]

    def _try(self, call: Call) -> Tried | str:
        key = self._key(call)
        if key not in self._tried:
            known = self._recorder.kinds[self._recorder.form(call.unit), call.pattern]
            ranks = self.ranks.ranks
            counted = ranks.forward_bytes, ranks.backward_bytes
            try:
                block = self._recorder.unit(call.unit)
                self._tried[key] = _Trial(block, call, known, self._splits[call.unit], self.ranks, self._device).found()
            finally:
                ranks.forward_bytes, ranks.backward_bytes = counted
        return self._tried[key]

    def _key(self, call: Call) -> Any:
        return *self._form(call.unit), call.pattern


def _unforeseen() -> None:
    raise ValueError("glue needs rows of other ranks, which its recording did not foresee")


class _Trial:
    """Of one unit. Args: known: arguments of calls alike, the first with values where they are known."""

    def __init__(
        self,
        block: nn.Module,
        call: Call,
        known: Sequence[tuple[Any, Any]],
        splits: Sequence[Split],
        ranks: RowsOf,
        device: torch.device,
    ) -> None:
        assert call.rows is not None
        self._block, self._call, self._splits, self._ranks, self._device = block, call, splits, ranks, device
        self._known, (self._args, self._kwargs), self._at = known, known[0], call.rows[0]
        self._rows = tree_leaves(known[0])[self._at].shape[-2]
        self._own = ranks.own(self._rows)
        self._flow = _Watched(block, self._args, self._kwargs, splits)
        self._cuts = cuts_of(block, splits, ranks.ranks.degree)
        self._summed = self._flow.used_parameters - self._cuts.keys()
        self._whole = self._run(None)

    def found(self) -> Tried | str:
        """The first way that is right, or why none is; the same on all ranks."""
        if isinstance(self._whole, str):
            return self._whole
        reasons = []
        for way in self._ways():
            at = AtWork(self._ranks, kept_own=set())
            reason = self._differs(self._whole, way, at) or self._unread(way, at)
            if reason is None:
                return Tried(way=way, summed=frozenset(self._summed), kept_own=frozenset(at.kept_own))
            reasons.append(reason)
        return reasons[0]

    def _ways(self) -> Iterator[SequenceWay]:
        """First what runs through the unit alone is cut, then one more of the arguments with as many rows; rows come
        together around modules first, then before layers."""
        others = [position for position in range(len(tree_leaves(self._known[0]))) if self._along(position)]
        for more in ((), *((position,) for position in others)):
            cut = frozenset({self._at, *more})
            choices = [self._flow.places(index, cut, self._rows) for index in range(len(self._splits))]
            yield from (SequenceWay(cut=cut, around=around) for around in product(*choices))

    def _unread(self, way: SequenceWay, at: AtWork) -> str | None:
        """Where a module is given rows of all ranks, and its layers read something else."""
        for split, around in zip(self._splits, way.around, strict=True):
            if around is not None and not at.kept_own & set(split.pair.columns):
                return f"{split.pair.columns[0]} does not read what {split.around} is given"
        return None

    def _along(self, position: int) -> bool:
        alike = [(leaves[position], leaves[self._at].shape[-2]) for leaves in map(tree_leaves, self._known)]
        return position != self._at and all(has_rows(leaf, rows) for leaf, rows in alike)

    def _differs(self, whole: Results, way: SequenceWay, at: AtWork) -> str | None:
        found = self._run((way, at))
        reason = found if isinstance(found, str) else None
        if not self._any(reason is not None):
            assert not isinstance(found, str)
            ranks = self._ranks.ranks
            expected = [
                (name, self._part(value) if "output" in name else self._cuts[name].own(value, ranks.index))
                if "output" in name or name in self._cuts
                else (name, value)
                for name, value in whole
            ]
            got = [
                (name, self._valid(value, other) if "output" in name else value)
                for (name, value), (_, other) in zip(found, whole, strict=True)
            ]
            reason = first_difference(expected, got)
            if not self._any(reason is not None):
                return None
        return reason or "another rank's rows differ"

    def _run(self, how: tuple[SequenceWay, AtWork] | None) -> Results | str:
        """Whole, or on the rank's rows."""
        if how is None:
            block = drawn_block(self._block, self._device, lambda _, value: value)
            return run_drawn(block, block, self._args, self._kwargs, self._device)
        way, at = how
        index = self._ranks.ranks.index

        def own(name: str, value: Tensor) -> Tensor:
            return self._cuts[name].own(value, index) if name in self._cuts else value

        block = drawn_block(self._block, self._device, own)
        set_up_rows(block, self._splits, self._summed, at)

        def on_rows(*args: Any, **kwargs: Any) -> Any:
            forward, args, kwargs = on_sequence_rows(block, args, kwargs, way, self._rows, at)
            return forward(*args, **kwargs)

        assert not isinstance(self._whole, str)
        shapes = {name: value.shape for name, value in self._whole}

        def weight(name: str, _: Tensor) -> Tensor:
            value = drawn(name, shapes[name], self._device)
            return self._padded(value) if has_rows(value, self._rows) else value

        return run_drawn(block, on_rows, self._args, self._kwargs, self._device, weight)

    def _padded(self, whole: Tensor) -> Tensor:
        return self._own.take(whole.movedim(-2, 0)).movedim(0, -2)

    def _part(self, whole: Tensor) -> Tensor:
        first, end = self._own.ends
        return whole.narrow(-2, first, end - first) if has_rows(whole, self._rows) else whole

    def _valid(self, local: Tensor, whole: Tensor) -> Tensor:
        first, end = self._own.ends
        fits = has_rows(whole, self._rows) and local.dim() > 1 and local.shape[-2] == self._own.size
        return local.narrow(-2, 0, end - first) if fits else local

    def _any(self, failed: bool) -> bool:
        flag = torch.tensor([failed], dtype=torch.int32, device=self._device)
        all_reduce(flag, self._ranks.ranks.group, dist.ReduceOp.MAX)
        return bool(flag.item())


class _Watched:
    """What a unit's parameters reach, and what modules around its split layers are given, seen in one forward without
    weights. Attributes: used_parameters: that its result is made of."""

    def __init__(self, block: nn.Module, args: Any, kwargs: Any, splits: Sequence[Split]) -> None:
        linears = {name: part for name, part in block.named_modules() if type(part) is nn.Linear}
        args, kwargs = tree_map(fresh, (args, kwargs))
        flow = LinearFlow(block, linears, tree_leaves((args, kwargs)))
        modules = {split.around: block.get_submodule(split.around) for split in splits if split.around}
        self._given: dict[str, list[tuple[frozenset[str | int], int | None]]] = {}
        self._splits = splits

        def watched(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                leaves = tree_leaves((args, kwargs))
                rows = [x.shape[-2] if is_float(x) and x.dim() > 1 else None for x in leaves]
                self._given.setdefault(name, list(zip(map(flow.used, leaves), rows, strict=True)))
                return forward(*args, **kwargs)

            return called

        with replaced_forwards(modules, watched), torch.no_grad(), half_meta(), any_routing(), flow:
            result = block(*args, **kwargs)
        self.used_parameters = {name for name in flow.used(result) if isinstance(name, str)}

    def places(self, index: int, cut: frozenset[int], rows: int) -> tuple[int | None, ...]:
        """Where rows of all ranks may come together for a split: an argument of the module around, or before layers."""
        split = self._splits[index]
        given = self._given.get(split.around, [])
        local = [position for position, (made_of, length) in enumerate(given) if length == rows and made_of & cut]
        return (local[0], None) if len(local) == 1 else (None,)
