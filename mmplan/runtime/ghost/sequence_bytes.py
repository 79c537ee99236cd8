"""Bytes that tensor-parallel ranks with rows of their own give to gathers and sums in a forward and in a backward, told
from a recording."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch import nn

from mmplan.runtime.ghost.flow import Source
from mmplan.runtime.ghost.linear_flow import Entry
from mmplan.runtime.ghost.recording import Call, Recording
from mmplan.runtime.ghost.returning import returning_calls, with_gradient
from mmplan.runtime.ghost.sequence_trials import SequenceWays, Tried
from mmplan.runtime.ghost.split_linears import Split


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceSums:
    """Of one stage (see `StageSums`). splits: of its units that run on some rows; recomputed: those that run once more
    for their backward; trained: names of parameters of the whole model."""

    model: nn.Module
    ways: SequenceWays
    splits: Mapping[str, Sequence[Split]]
    recomputed: Set[str]
    trained: Set[str]

    @property
    def exchanging(self) -> Set[str]:
        return self.splits.keys()

    def forward_bytes(self, recording: Recording) -> int:
        """What is gathered and summed inside, and outputs that others need whole."""
        return sum(self._inside(call) + self._whole(recording, call) for call in self._calls(recording))

    def backward_bytes(self, recording: Recording) -> int:
        """Their gradients, gathers for those of weights, and sums of what every rank has whole."""
        returning, total = self.returning(recording), 0
        for call in self._calls(recording):
            tried, given = self.ways.of(call), with_gradient(call, returning, self.trained)
            numbers = sum(
                self._back(call, split, tried, index, given) for index, split in enumerate(self.splits[call.unit])
            )
            numbers += sum(self._numel(call, name) for name in tried.summed if f"{call.unit}.{name}" in self.trained)
            for position in tried.way.cut & given:
                elements, follows = call.row_arguments[position]
                if not (follows and call.arguments[position][0] <= recording.apart):
                    numbers += self._padded(call, elements)
            total += self._size(call) * numbers
            if call.unit in self.recomputed and (call.unit, call.number) in returning:
                total += self._inside(call)
        return total

    def returning(self, recording: Recording) -> set[tuple[str, int]]:
        return returning_calls(recording, self.model, self.trained)

    def _calls(self, recording: Recording) -> list[Call]:
        return [call for call in recording.calls if call.unit in self.splits and call.rows is not None]

    def _inside(self, call: Call) -> int:
        tried, numbers = self.ways.of(call), 0
        for index, split in enumerate(self.splits[call.unit]):
            numbers += sum(self._padded(call, self._read(call, e)) for e in self._gathered(split, tried, index))
            given = call.linears[split.pair.row][1]
            numbers += self._padded(call, given) if self._is_local(split, tried) else given
        return self._size(call) * numbers

    def _back(self, call: Call, split: Split, tried: Tried, index: int, given: Set[int]) -> int:
        numbers = 0
        for entry in self._gathered(split, tried, index):
            readers = tried.kept_own & set(entry.readers)
            again = any(f"{call.unit}.{name}.weight" in self.trained for name in readers)
            numbers += self._padded(call, self._read(call, entry)) * (
                again + self._has_gradient(call, entry.made_of, given)
            )
        for entry in split.pair.entries:
            if not tried.way.local(entry) and self._has_gradient(call, entry.made_of, given):
                numbers += self._read(call, entry)
        layers = (*split.pair.columns, split.pair.row)
        own = {
            name
            for layer in layers
            for name in (f"{layer}.weight", f"{layer}.bias")
            if name != f"{split.pair.row}.bias"
        }
        made_of = own.union(split.pair.between, *(entry.made_of for entry in split.pair.entries))
        if self._is_local(split, tried) and self._has_gradient(call, made_of, given):
            numbers += self._padded(call, call.linears[split.pair.row][1])
        return numbers

    def _gathered(self, split: Split, tried: Tried, index: int) -> list[Entry]:
        """What stands for the tensors whose rows come together."""
        local = [entry for entry in split.pair.entries if tried.way.local(entry)]
        if tried.way.around[index] is None:
            return local
        return [entry for entry in local if tried.kept_own & set(entry.readers)][:1]

    @staticmethod
    def _is_local(split: Split, tried: Tried) -> bool:
        return any(tried.way.local(entry) for entry in split.pair.entries)

    def _has_gradient(self, call: Call, made_of: Set[str | int], given: Set[int]) -> bool:
        return any(one in given or f"{call.unit}.{one}" in self.trained for one in made_of)

    def _whole(self, recording: Recording, call: Call) -> int:
        slots = range(len(call.output.leaves))
        whole = [s for slot in slots if (s := Source(call.unit, call.number, slot)) in recording.whole]
        likes = [recording.like(source) for source in whole]
        return sum(self._padded(call, like.numel()) * like.element_size() for like in likes)

    def _padded(self, call: Call, elements: int) -> int:
        """Of the rows of all ranks together."""
        assert call.rows is not None
        return elements // call.rows[1] * self.ways.size(call.rows[1]) * self.ways.ranks.ranks.degree

    @staticmethod
    def _read(call: Call, entry: Entry) -> int:
        return call.linears[entry.readers[0]][0]

    def _numel(self, call: Call, name: str) -> int:
        return self.model.get_submodule(call.unit).get_parameter(name).numel()

    def _size(self, call: Call) -> int:
        return next(self.model.get_submodule(call.unit).parameters()).element_size()
