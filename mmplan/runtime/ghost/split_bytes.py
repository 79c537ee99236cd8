"""Bytes that ranks which share blocks give to sums in a forward and in a backward, told from a recording alone; and
rows of experts (`expert_bytes.py`)."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch import nn

from mmplan.runtime.ghost.expert_bytes import WithGradient, expert_backward_bytes, expert_forward_bytes
from mmplan.runtime.ghost.linear_flow import Entry, Pair
from mmplan.runtime.ghost.recording import Call, Recording
from mmplan.runtime.ghost.returning import returning_calls, with_gradient
from mmplan.runtime.ghost.row_trials import RowWays
from mmplan.runtime.ghost.split_experts import ExpertSplit
from mmplan.runtime.ghost.split_linears import Split
from mmplan.runtime.ghost.unit_rows import has_rows
from mmplan.runtime.tensor_sums import TensorRanks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SplitSums:
    """Of one stage.

    splits, experts: of its units; ranks: that share them; recomputed: those that run once more for their backward;
    trained: names of parameters of the whole model; ways: how units run on some rows, None where they run whole.
    """

    model: nn.Module
    splits: Mapping[str, Sequence[Split]]
    experts: Mapping[str, ExpertSplit]
    ranks: TensorRanks | None
    recomputed: Set[str]
    trained: Set[str]
    ways: RowWays | None = None

    @property
    def exchanging(self) -> Set[str]:
        """Units whose forward exchanges something."""
        return self.splits.keys() | self.experts.keys()

    def forward_bytes(self, recording: Recording) -> int:
        return sum(self._forward_bytes(call) for call in recording.calls)

    def backward_bytes(self, recording: Recording) -> int:
        """What is summed in a backward, sums that are made once more included."""
        returning = self.returning(recording)
        total = 0
        for call in recording.calls:
            if call.unit not in self.exchanging:
                continue
            given = with_gradient(call, returning, self.trained)
            elements = sum(self._backward_elements(call, split.pair, given) for split in self.splits.get(call.unit, ()))
            total += self._element_bytes(call) * elements + self._backward_bytes_of_experts(call, given)
            if call.unit in self.recomputed and (call.unit, call.number) in returning:
                total += self._forward_bytes(call)
        return total

    def returning(self, recording: Recording) -> set[tuple[str, int]]:
        return returning_calls(recording, self.model, self.trained)

    def _forward_bytes(self, call: Call) -> int:
        elements = sum(self._of_row(call, split.pair) for split in self.splits.get(call.unit, ()))
        split = self.experts.get(call.unit)
        if split is None or self.ranks is None:
            return self._element_bytes(call) * elements
        return self._element_bytes(call) * elements + expert_forward_bytes(
            self._tokens(call, split), split, self.ranks, self._element_bytes(call)
        )

    def _backward_bytes_of_experts(self, call: Call, given: Set[int]) -> int:
        split = self.experts.get(call.unit)
        if split is None or self.ranks is None:
            return 0
        gradient = WithGradient(
            rows=self._has_gradient(call, split.experts.made_of, given),
            weights=self._has_gradient(call, split.experts.weights_made_of, given),
            experts=any(f"{call.unit}.{name}" in self.trained for name in split.experts.parameters),
        )
        return expert_backward_bytes(self._tokens(call, split), split, self.ranks, self._element_bytes(call), gradient)

    def _has_gradient(self, call: Call, made_of: Set[str | int], given: Set[int]) -> bool:
        return any(one in given or f"{call.unit}.{one}" in self.trained for one in made_of)

    def _backward_elements(self, call: Call, pair: Pair, given: Set[int]) -> int:
        """Args: given: positions of arguments that have a gradient."""

        def has_gradient(entry: Entry) -> bool:
            return self._has_gradient(call, entry.made_of, given)

        of_inputs = sum(self._of_entry(call, entry) for entry in pair.entries if has_gradient(entry))
        between = [f"{call.unit}.{name}" for name in pair.between]
        return of_inputs + sum(self.model.get_parameter(name).numel() for name in between if name in self.trained)

    def _element_bytes(self, call: Call) -> int:
        """Of an activation and of a weight."""
        return next(self.model.get_submodule(call.unit).parameters()).element_size()

    def _tokens(self, call: Call, split: ExpertSplit) -> int:
        """Of a call, on this rank."""
        output = call.output.leaves[split.experts.output]
        along = call.rows is not None and has_rows(output, call.rows[1])
        return self._here(call, int(output.numel()) // split.experts.width, along=along)

    def _of_entry(self, call: Call, entry: Entry) -> int:
        """Elements that layers split by columns read."""
        return self._here(call, call.linears[entry.readers[0]][0], along=self._along_rows(call, entry))

    def _of_row(self, call: Call, pair: Pair) -> int:
        """Elements that a layer split by rows gives."""
        along = any(self._along_rows(call, entry) for entry in pair.entries)
        return self._here(call, call.linears[pair.row][1], along=along)

    def _along_rows(self, call: Call, entry: Entry) -> bool:
        """Whether it is made of arguments of which this rank has some rows."""
        if self.ways is None or call.rows is None:
            return False
        return bool(entry.made_of & self.ways.of(call).dims.keys())

    def _here(self, call: Call, elements: int, *, along: bool) -> int:
        if not along or self.ways is None or call.rows is None:
            return elements
        return elements // call.rows[1] * 2 * self.ways.ranks.own(call.rows[1]).size
