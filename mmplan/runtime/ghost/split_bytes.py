"""Bytes that ranks which share blocks give to sums in a forward and in a backward, told from a recording alone."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch import nn

from mmplan.runtime.ghost.linear_flow import Entry, Pair
from mmplan.runtime.ghost.recording import Call, Recording
from mmplan.runtime.ghost.split_linears import Split
from mmplan.runtime.ghost.units import parameter_names


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

    def forward_bytes(self, recording: Recording) -> int:
        return self.element_bytes * sum(self._forward_elements(call) for call in recording.calls)

    def backward_bytes(self, recording: Recording) -> int:
        """What is summed in a backward, sums that are made once more included."""
        returning = self._returning(recording)
        total = 0
        for call in recording.calls:
            if call.unit not in self.splits:
                continue
            given = {
                position
                for position, (reads, parameters) in call.arguments.items()
                if parameters & self.trained or any((source.unit, source.call) in returning for source in reads)
            }
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

    def _returning(self, recording: Recording) -> set[tuple[str, int]]:
        """Calls whose outputs have a gradient."""
        found = set[tuple[str, int]]()
        for call in recording.calls:
            own = {*parameter_names(self.model, call.unit), *call.parameters}
            if own & self.trained or any((source.unit, source.call) in found for source in call.reads):
                found.add((call.unit, call.number))
        return found
