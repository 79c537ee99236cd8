"""What ranks have yet to say of compressed gradients, each in its own file of a checkpoint.

It belongs to a rank's part of the weights: under another plan parts differ, and it is left out.
"""

from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from mmplan.errors import InputError
from mmplan.runtime.weighted_stage import WeightedStage

_PREFIX = "unsaid/"


def unsaid_gradients(stages: Iterable[WeightedStage]) -> dict[str, Tensor]:
    """Copies in host memory, by key in the file of this rank."""
    sums = [one for stage in stages for one in stage.state.compressed]
    return {f"{_PREFIX}{layer}": tensor.to("cpu", copy=True) for one in sums for layer, tensor in one.unsaid.items()}


def restore_unsaid(file: Path, stages: Iterable[WeightedStage]) -> None:
    """What is in a rank's file. Raises InputError where it is of other tensors."""
    sums = [one for stage in stages for one in stage.state.compressed]
    if not sums:
        return
    with safe_open(file, framework="pt") as opened:
        keys = (key for key in opened.keys() if key.startswith(_PREFIX))  # noqa: SIM118 - it is no mapping
        found = {key.removeprefix(_PREFIX): opened.get_tensor(key) for key in keys}
    for one in sums:
        try:
            one.go_on_from(found)
        except ValueError as error:
            raise InputError(f"what was not said of gradients does not fit: {error}", file=file) from error
