"""Drift of the embeddings, online, with a bound on false alarms.

Each reading gives a score: how far a batch's mean embedding lies from where it was to be expected. Its conformal
p-value is the share of scores so far that are at least as large, ties broken at random: while scores are exchangeable
the p-values are independent and uniform (Vovk et al., Algorithmic Learning in a Random World, 2005, theorem 8.2).
Betting with a density f, the Shiryaev-Roberts sum R_t = (1 + R_{t-1}) f(p_t) makes R_t - t a martingale, so by optional
stopping and Doob

    E[readings until a false alarm] >= c        P(a false alarm within n readings) <= n / c

when it fires at R_t >= c. f is the mixture of all power bets e p^(e-1), 0 < e < 1, in closed form.

What scores are exchangeable? Of a frozen encoder, distances from the mean of the first readings: batches drawn alike
suffice. An encoder that learns moves; there scores are norms of recursive residuals (Brown, Durbin and Evans,
Techniques for testing the constancy of regression relationships over time, 1975): within a window of 64 readings a
parabola is fitted to the readings before, and what the next one is off it, over sqrt(1 + leverage), is independent of
all others and of one normal law, if within the window the mean moves along a parabola and the noise of batches is
normal, independent and alike. That is the assumption. Windows that begin half a window later are watched as well; the
mean of both sums keeps the bound.

A distance below the standard error of the batch's mean does not count: other samples would have moved it further. So
small movements of weights do not count behind a BatchNorm, which gives all batches one mean.
"""

import bisect
import math
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mmplan.runtime.health.rule import Rule

RULE = Rule(
    monitor="drift",
    metric="Shiryaev-Roberts statistic of conformal p-values of how far a batch's mean embedding lies from the "
    "reference, of an encoder that learns from its own course; counts where it is above the mean's standard error",
    unit="evidence",
    limit=10_000.0,
    fires="above",
    source="ours: on average at most one false alarm in 10,000 readings, proven for a frozen encoder, and for one that "
    "learns where it moves along a parabola within 64 readings",
    advice="the data or the encoder has changed: compare samples from before and after this step, check the order of "
    "shards of the data set, and whether a frozen tower is still frozen",
    certainty=0.7,
    explains=("drift", "loss", "robustness", "cmrc"),  # the other encoder follows what the loss now asks
)

REFERENCE_READINGS = 16  # their mean is the reference; they get no score
WINDOW_READINGS, FIRST_READINGS = 64, 10  # within which a course is a parabola; the first have no score


def betting_density(p: float) -> float:
    """The integral of e p^(e-1) over e from 0 to 1: a density on (0, 1]."""
    if p >= 1.0 - 1e-6:
        return 0.5  # its limit
    log = math.log(p)
    return (1.0 - p + p * log) / (p * log * log)


class DriftDetector:
    """Takes scores one by one; `seed` breaks ties of scores."""

    def __init__(self, seed: int = 0) -> None:
        self._sorted: list[float] = []
        self._random = random.Random(seed)
        self.statistic = 0.0
        self._sum = self._least = 0.0
        self._since_least = 0

    @property
    def readings_ago(self) -> int:
        """When the change was most probably: behind the least sum of logarithms of bets so far."""
        return max(self._since_least - 1, 0)

    def update(self, score: float) -> float:
        """The statistic with this score; logarithms keep it from overflowing."""
        below = bisect.bisect_left(self._sorted, score)
        equal = bisect.bisect_right(self._sorted, score) - below + 1
        bisect.insort(self._sorted, score)
        count = len(self._sorted)
        larger = count - below - equal
        p = max((larger + self._random.random() * equal) / count, 1e-9)
        bet = betting_density(p)
        self.statistic = min((1.0 + self.statistic) * bet, 1e300)
        self._sum += math.log(bet)
        self._since_least += 1
        if self._sum < self._least:
            self._least, self._since_least = self._sum, 0
        return self.statistic


class Drift(NamedTuple):
    """The evidence, the distance of this batch, and how many readings ago the change was most probably."""

    statistic: float
    distance: float
    readings_ago: int


class EmbeddingDrift:
    """Takes mean embeddings [d] of batches one by one; `learns`: the encoder is trained."""

    def __init__(self, *, learns: bool, seed: int = 0) -> None:
        scores: tuple[Callable[[Tensor], float | None], ...] = (_Reference(),)
        if learns:
            scores = _Course(0), _Course(WINDOW_READINGS // 2)
        self._watched = [(score, DriftDetector(seed + index)) for index, score in enumerate(scores)]

    def update(self, mean: Tensor) -> Drift | None:
        """None while there is nothing yet to hold it against."""
        distances = []
        for score, detector in self._watched:
            distance = score(mean.detach().double().cpu())
            if distance is not None:
                distances.append(distance)
                detector.update(distance)
        if not distances:
            return None
        statistics = [detector.statistic for _, detector in self._watched]
        _, surest = max(self._watched, key=lambda pair: pair[1].statistic)
        return Drift(sum(statistics) / len(statistics), max(distances), surest.readings_ago)


class _Reference:
    """Distance from the mean of the first readings."""

    def __init__(self) -> None:
        self._first: list[Tensor] = []

    def __call__(self, mean: Tensor) -> float | None:
        if len(self._first) < REFERENCE_READINGS:
            self._first.append(mean)
            return None
        return float((mean - torch.stack(self._first).mean(0)).norm())


class _Course:
    """Norm of the recursive residual from the parabola through the readings of this window; the first window begins
    `late` readings after the others."""

    def __init__(self, late: int) -> None:
        self._window: list[Tensor] = []
        self._late = late

    def __call__(self, mean: Tensor) -> float | None:
        if self._late:
            self._late -= 1
            return None
        if len(self._window) == WINDOW_READINGS:
            self._window = []
        residual = None
        if len(self._window) >= FIRST_READINGS:
            residual = recursive_residual(torch.stack(self._window), mean)
        self._window.append(mean)
        return residual


def standard_error(rows: Tensor) -> float:
    """Of the mean of embeddings [n, d]: sqrt(tr Cov / n)."""
    return math.sqrt(float(rows.double().var(0, correction=0).sum()) / len(rows))


def recursive_residual(before: Tensor, now: Tensor, degree: int = 2) -> float:
    """||now - its prediction by a least-squares polynomial through `before`|| / sqrt(1 + leverage).

    Args:
        before: [n, d], at places 0 to n - 1; now: [d], at place n.
    """
    count = len(before)
    places = (torch.arange(count + 1, dtype=before.dtype) - count) / count
    powers = torch.stack([places**power for power in range(degree + 1)], dim=1)
    q, r = torch.linalg.qr(powers[:count])
    weights = q @ torch.linalg.solve_triangular(r.T, powers[count][:, None], upper=False)[:, 0]
    return float((now - weights @ before).norm()) / math.sqrt(1 + float(weights.square().sum()))
