"""Two variants of a training against each other, with the same seeds: does one reach a target in fewer steps?

What seeds have in common (data, initial weights) cancels in the difference of a pair, so that few seeds tell much. The
interval is Student's t of the paired differences. Where a variant misses the target there is no difference to take, but
still an order: the sign test over all pairs decides.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from mmplan.runtime.student_t import t_quantile

# seed -> steps until the target was reached; None: not within the steps allowed
Variant = Callable[[int], int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Steps of variant b less those of a over the seeds with which both reached the target.

    Attributes:
        steps: (of a, of b) by seed.
        low, high: confidence interval of the mean difference; infinite with fewer than two complete pairs.
    """

    steps: tuple[tuple[int | None, int | None], ...]
    confidence: float
    difference: float
    low: float
    high: float

    @property
    def complete(self) -> tuple[tuple[int, int], ...]:
        return tuple((a, b) for a, b in self.steps if a is not None and b is not None)

    @property
    def missed(self) -> tuple[int, int]:
        """How often a and b did not reach the target: with any of these the difference is not the whole answer."""
        return sum(a is None for a, _ in self.steps), sum(b is None for _, b in self.steps)

    @property
    def wins(self) -> tuple[int, int]:
        """With how many seeds a, and b, was there first; a target missed comes last."""
        order = [tuple(math.inf if steps is None else steps for steps in pair) for pair in self.steps]
        return sum(a < b for a, b in order), sum(b < a for a, b in order)

    @property
    def sign_p(self) -> float:
        """Two-sided p value of the wins if both were equally good."""
        total = sum(self.wins)
        return min(1.0, math.ldexp(sum(math.comb(total, k) for k in range(min(self.wins) + 1)), 1 - total))

    @property
    def verdict(self) -> str:
        missed = any(self.missed)
        if self.sign_p >= 1 - self.confidence if missed else self.low <= 0 <= self.high:
            return "no difference shown"
        return (
            "b needs fewer steps"
            if (self.wins[1] > self.wins[0] if missed else self.high < 0)
            else "b needs more steps"
        )


def compare(a: Variant, b: Variant, seeds: Sequence[int], *, confidence: float = 0.95) -> Comparison:
    """Run both variants with each seed.

    Raises:
        ValueError: fewer than two seeds, or one twice.
    """
    if len(set(seeds)) < max(2, len(seeds)):
        raise ValueError(f"a comparison needs at least 2 seeds, each once: {list(seeds)}")
    return paired([(a(seed), b(seed)) for seed in seeds], confidence=confidence)


def paired(steps: Sequence[tuple[int | None, int | None]], *, confidence: float = 0.95) -> Comparison:
    """What such pairs say."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence} is not between 0 and 1")
    differences = [b - a for a, b in steps if a is not None and b is not None]
    mean, half = (fmean(differences), math.inf) if differences else (math.nan, math.inf)
    if len(differences) > 1:
        half = t_quantile((1 + confidence) / 2, len(differences) - 1) * stdev(differences) / len(differences) ** 0.5
    return Comparison(steps=tuple(steps), confidence=confidence, difference=mean, low=mean - half, high=mean + half)
