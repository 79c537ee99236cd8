"""Two variants of a training against each other, with the same seeds: does one reach a target in fewer steps?

What seeds have in common (data, initial weights) cancels in the difference of a pair, so that few seeds tell much. The
interval is Student's t of the paired differences.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

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
    def verdict(self) -> str:
        if any(self.missed):
            return f"undecided: a missed the target {self.missed[0]} times, b {self.missed[1]}"
        if self.low <= 0 <= self.high:
            return "no difference shown"
        return "b needs fewer steps" if self.high < 0 else "b needs more steps"


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


def t_quantile(probability: float, degrees: int) -> float:
    """Of Student's t, by bisection on its distribution function; probability above 0.5."""
    low, high = 0.0, 1.0
    while _t_below(high, degrees) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _t_below(t: float, degrees: int) -> float:
    """P(T <= t) by the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / degrees**0.5)
    cos2, term, total = math.cos(angle) ** 2, 1.0, 1.0
    for k in range(2 + degrees % 2, degrees - 1, 2):
        term *= cos2 * (k - 1) / k
        total += term
    if degrees % 2 == 0:
        inside = math.sin(angle) * total
    else:
        inside = 2 / math.pi * (angle + (math.sin(angle) * math.cos(angle) * total if degrees > 1 else 0.0))
    return (1 + inside) / 2
