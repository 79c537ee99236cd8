"""What of a recorded forward has a backward."""

from collections.abc import Set

from torch import nn

from mmplan.runtime.ghost.recording import Call, Recording
from mmplan.runtime.ghost.units import parameter_names


def returning_calls(recording: Recording, model: nn.Module, trained: Set[str]) -> set[tuple[str, int]]:
    """Calls whose outputs have a gradient. Args: trained: names of parameters of the model."""
    found = set[tuple[str, int]]()
    for call in recording.calls:
        own = {*parameter_names(model, call.unit), *call.parameters}
        if own & trained or any((source.unit, source.call) in found for source in call.reads):
            found.add((call.unit, call.number))
    return found


def with_gradient(call: Call, returning: Set[tuple[str, int]], trained: Set[str]) -> set[int]:
    """Positions of arguments that have a gradient."""
    return {
        position
        for position, (reads, parameters) in call.arguments.items()
        if parameters & trained or any((source.unit, source.call) in returning for source in reads)
    }
