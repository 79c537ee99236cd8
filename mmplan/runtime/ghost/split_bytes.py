"""Bytes that ranks which share blocks give to sums in a forward and in a backward, told from a recording alone."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch import nn

from mmplan.runtime.ghost.linear_flow import Entry, Pair
from mmplan.runtime.ghost.recording import Call, Recording
from mmplan.runtime.ghost.returning import returning_calls, with_gradient
from mmplan.runtime.ghost.split_linears import Split


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SplitSums:
    """Of one stage.

    splits: of its units; recomputed: those that run once more for their backward; trained: names of parameters of the
    whole model; element_bytes: of an activation and of a weight.
    """

    model: nn.Module
    splits: Mapping[str, Sequence[Split]]
    recomputed: Set[str]
    trained: Set[str]
    element_bytes: int

    @property
    def exchanging(self) -> Set[str]:
        """Units whose forward exchanges something."""
        return self.splits.keys()

    def forward_bytes(self, recording: Recording) -> int:
        return self.element_bytes * sum(self._forward_elements(call) for call in recording.calls)

    def backward_bytes(self, recording: Recording) -> int:
        """What is summed in a backward, sums that are made once more included."""
        returning = returning_calls(recording, self.model, self.trained)
        total = 0
        for call in recording.calls:
            if call.unit not in self.splits:
                continue
            given = with_gradient(call, returning, self.trained)
            total += sum(self._backward_elements(call, split.pair, given) for split in self.splits[call.unit])
            if call.unit in self.recomputed and (call.unit, call.number) in returning:
                total += self._forward_elements(call)
        return self.element_bytes * total

    def _forward_elements(self, call: Call) -> int:
        return sum(call.linears[split.pair.row][1] for split in self.splits.get(call.unit, ()))

    def _backward_elements(self, call: Call, pair: Pair, given: Set[int]) -> int:
        """Args: given: positions of arguments that have a gradient."""

        def has_gradient(entry: Entry) -> bool:
            return any(one in given or f"{call.unit}.{one}" in self.trained for one in entry.made_of)

        of_inputs = sum(call.linears[entry.readers[0]][0] for entry in pair.entries if has_gradient(entry))
        between = [f"{call.unit}.{name}" for name in pair.between]
        return of_inputs + sum(self.model.get_parameter(name).numel() for name in between if name in self.trained)
