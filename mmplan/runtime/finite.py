"""Losses and gradients that are no numbers: found before they reach the weights, named, and by policy left out.

A sum tells: it is finite if and only if all its terms are (short of an overflow at 3e38), and costs one pass over a
tensor. Outputs of layers are watched to say where it began; what decides are losses and gradients.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmplan.errors import RunError
from mmplan.runtime.measurement import StepMeasurement
from mmplan.scenario.document import counted


@dataclass(frozen=True, slots=True)
class Unsound:
    """Where a rank first saw what is no number; `microbatch` is -1 of gradients, which are sums over all."""

    stage: int
    microbatch: int
    what: str  # a layer, a unit of a job's model, or what the gradients are of


class OutputSums:
    """Sums of what layers compute in a step; read once, at its end."""

    def __init__(self) -> None:
        self._sums: list[tuple[int, str, Tensor]] = []
        self.on_output: Callable[[str, Tensor], None] | None = None  # sees all

    def add(self, microbatch: int, layer: str, output: Tensor) -> None:
        if output.is_floating_point():
            self._sums.append((microbatch, layer, output.detach().sum(dtype=torch.float32)))
            if self.on_output is not None:
                self.on_output(layer, output)

    def clear(self) -> None:
        self._sums = []

    def first_unsound(self) -> tuple[int, str] | None:
        """Microbatch and layer."""
        if not self._sums:
            return None
        finite = torch.stack([value for _, _, value in self._sums]).isfinite().tolist()
        return next((entry[:2] for entry, sound in zip(self._sums, finite, strict=True) if not sound), None)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    sums = [tensor.sum(dtype=torch.float32) for tensor in tensors]
    return not sums or bool(torch.stack(sums).isfinite().all())


def require_numbers(
    steps: Sequence[StepMeasurement], losses: Mapping[str, float], found: Sequence[Unsound | None], *, max_skips: int
) -> str:
    """What to note of the last of the steps if it was left out, else an empty text.

    Args:
        losses: of the last step, as they are.
        found: by rank.
        max_skips: steps in a row that may be left out.

    Raises:
        RunError: the run is to end.
    """
    step = steps[-1]
    wrong = [f"the loss of '{module}' is {loss}" for module, loss in losses.items() if not math.isfinite(loss)]
    places = sorted(((order(one), rank, one) for rank, one in enumerate(found) if one is not None), key=lambda p: p[:2])
    if not wrong and not places:
        return ""
    told = f"step {step.index}: {' and '.join(wrong) if wrong else 'a gradient is no number'}"
    for _, rank, one in places[:1]:
        kind = f"the gradients of {one.what}" if one.microbatch < 0 else f"the output of {one.what}"
        at = "" if one.microbatch < 0 else f", microbatch {one.microbatch}"
        told += f"; first seen in {kind} (stage {one.stage}{at}, rank {rank})"
    in_row = 0
    while in_row < len(steps) and steps[-1 - in_row].skipped:
        in_row += 1
    if in_row == 0:
        raise RunError(f"{told}; a smaller `optimizer.learning_rate` may help, and --on-nan skip leaves such steps out")
    if in_row > max_skips:
        raise RunError(f"{told}; {counted(in_row, 'step')} in a row left out, --max-skips allows {max_skips}")
    return f"{told}; the step is left out, no weight has changed"


def order(one: Unsound) -> tuple[bool, int, int]:
    """Outputs come before gradients, and go down the stages; gradients go up."""
    backward = one.microbatch < 0
    return (backward, -one.stage if backward else one.stage, one.microbatch)
