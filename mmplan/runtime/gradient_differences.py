"""How far loss and gradients of a plan's first step are from those of one process. Imports no torch."""

import math
import sys
from dataclasses import dataclass

TOLERANCE = 1e-5  # relative, in fp32: sums in another order differ by some 1e-7


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Of a parameter's gradient: the largest of any element over the largest element. Gradients that are zero but for
    rounding count by a thousandth of the model's largest."""

    parameter: str
    relative: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Losses are sums over the modules that have one. `differences`: the largest first; `missing`: trained parameters
    of which the ranks have not every element."""

    processes: int
    loss: float
    loss_in_one: float
    differences: tuple[Difference, ...]
    missing: tuple[str, ...]

    @property
    def loss_difference(self) -> float:
        """Relative; infinite where one is no number."""
        relative = abs(self.loss - self.loss_in_one) / max(abs(self.loss_in_one), sys.float_info.min)
        return math.inf if math.isnan(relative) else relative

    @property
    def wrong(self) -> tuple[Difference, ...]:
        return tuple(one for one in self.differences if one.relative > TOLERANCE)

    @property
    def passed(self) -> bool:
        return not self.missing and not self.wrong and self.loss_difference <= TOLERANCE
