"""Bytes that context-parallel ranks give to gathers and sums in a forward and in a backward, told from a recording."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import nn

from mmplan.cost_models.values import rows_of_context_rank
from mmplan.runtime.ghost.flow import Source
from mmplan.runtime.ghost.own_rows import Attention
from mmplan.runtime.ghost.recording import Call, Recording
from mmplan.runtime.ghost.returning import returning_calls, with_gradient
from mmplan.runtime.ghost.row_trials import RowWays
from mmplan.runtime.ghost.split_linears import Split
from mmplan.runtime.ghost.unit_rows import AttendedRow
from mmplan.scenario.technique import ContextParallel


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowSums:
    """Of one stage.

    units: of the stage; recomputed: those that run once more for their backward; trained: names of parameters of the
    whole model; computes_loss: whether the stage does; splits: of units, what tensor-parallel ranks share.
    """

    model: nn.Module
    ways: RowWays
    units: Set[str]
    recomputed: Set[str]
    trained: Set[str]
    computes_loss: bool
    splits: Mapping[str, Sequence[Split]]

    @property
    def exchanging(self) -> Set[str]:
        """Units whose forward exchanges something."""
        return self.units

    def forward_bytes(self, recording: Recording) -> int:
        """Keys and values of all rows, or rows for heads and back; outputs that glue needs whole; and losses."""
        total = recording.summed_bytes if self.computes_loss else 0
        for call in self._calls(recording):
            total += sum(self._attentions(call)) + self._whole_bytes(recording, call)
        return total

    def backward_bytes(self, recording: Recording) -> int:
        """Keys and values once more, and the gradients of all that was gathered or exchanged."""
        returning = self.returning(recording)
        of_loss = {(source.unit, source.call) for source in recording.loss.reads}
        returns = bool(of_loss & returning or recording.loss.parameters & self.trained)
        total = recording.summed_bytes if self.computes_loss and returns else 0
        for call in self._calls(recording):
            given = with_gradient(call, returning, self.trained)

            def has_gradient(made_of: Set[str | int], given: Set[int] = given, unit: str = call.unit) -> bool:
                return any(one in given or f"{unit}.{one}" in self.trained for one in made_of)

            attentions = self._attentions(call)
            for attention, row, size in self._each(call, attentions):
                returned = self._way(call, attention, row) != "all-to-all" and has_gradient(attention.keys_of)
                total += size * (has_gradient(attention.made_of) + returned)
            if (call.unit, call.number) in returning:
                total += self._whole_bytes(recording, call) + sum(attentions) * (call.unit in self.recomputed)
        return total

    def returning(self, recording: Recording) -> set[tuple[str, int]]:
        return returning_calls(recording, self.model, self.trained)

    def _calls(self, recording: Recording) -> list[Call]:
        return [call for call in recording.calls if call.unit in self.units and call.rows is not None]

    def _attentions(self, call: Call) -> list[int]:
        """What each attention of a call passes on, gathers or exchanges."""
        found, cp = [], self.ways.ranks.peers.degree
        for attention, row in zip(self.ways.of(call).attentions, call.attentions, strict=True):
            size, way = row.keys * self._padded(call), self._way(call, attention, row)
            if way == "all-to-all":
                size = (row.queries + row.keys + row.results) * self._padded(call) // cp
            elif way == "ring":
                size = size * (cp - 1) // cp
            found.append(size // self._parts(call, attention) if attention.over_rows else 0)
        return found

    def _each(self, call: Call, sizes: Sequence[int]) -> Iterable[tuple[Attention, AttendedRow, int]]:
        return zip(self.ways.of(call).attentions, call.attentions, sizes, strict=True)

    def _way(self, call: Call, attention: Attention, row: AttendedRow) -> ContextParallel:
        parts = self._parts(call, attention)
        return self.ways.ranks.way(row.query_heads // parts, row.key_heads // parts)

    def _parts(self, call: Call, attention: Attention) -> int:
        """Into how many parts tensor-parallel ranks split its heads."""
        columns = {name for split in self.splits.get(call.unit, ()) for name in split.pair.columns}
        shared = columns & {one.rpartition(".")[0] for one in attention.keys_of if isinstance(one, str)}
        return self.ways.ranks.ranks.degree if shared else 1

    def _whole_bytes(self, recording: Recording, call: Call) -> int:
        """Outputs of a call that are gathered for glue."""
        total = 0
        for slot in range(len(call.output.leaves)):
            source = Source(call.unit, call.number, slot)
            if source in recording.whole:
                like = recording.like(source)
                total += like.nbytes // like.shape[-2] * self._padded(call)
        return total

    def _padded(self, call: Call) -> int:
        """Rows of all ranks together."""
        assert call.rows is not None
        cp = self.ways.ranks.peers.degree
        return cp * rows_of_context_rank(call.rows[1], cp)
