"""Drift of the embeddings, online, with a bound on false alarms.

Each reading gives a score, the distance of a batch's mean embedding from a fixed reference. Its conformal p-value is
the
share of scores so far that are at least as large, ties broken at random: while scores are exchangeable the p-values are
independent and uniform (Vovk et al., Algorithmic Learning in a Random World, 2005, theorem 8.2). Betting with a
density f, the Shiryaev-Roberts sum R_t = (1 + R_{t-1}) f(p_t) makes R_t - t a martingale, so by optional stopping and
Doob

    E[readings until a false alarm] >= c        P(a false alarm within n readings) <= n / c

when it fires at R_t >= c. f is the mixture of all power bets e p^(e-1), 0 < e < 1, in closed form.

The bound needs exchangeable scores: those of something that should stand still, such as a frozen tower. What learns
moves all the time; there the reference is the mean of the last readings, which follows slow learning and not a jump.
Its scores depend on each other a little, and its false alarms are counted instead of bounded
(`benchmarks/health_rates.csv`).
"""

import bisect
import math
import random
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from mmplan.runtime.health.rule import Rule

RULE = Rule(
    monitor="drift",
    metric="Shiryaev-Roberts statistic of conformal p-values of the distance between a batch's mean embedding and the "
    "reference",
    unit="evidence",
    limit=1_000.0,
    fires="above",
    source="ours: on average at most one false alarm in 1,000 readings, proven for exchangeable scores",
    advice="the data or the encoder has changed: compare samples from before and after this step, check the order of "
    "shards of the data set, and whether a frozen tower is still frozen",
    certainty=0.7,
    explains=("loss", "robustness", "cmrc"),
)

REFERENCE_READINGS = 16  # their mean is the reference; they get no score


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
    """Distances of mean embeddings of batches from the mean of the first ones (`sliding`: of the last ones), and the
    evidence that they add up to."""

    def __init__(self, *, sliding: bool, seed: int = 0) -> None:
        self._sliding = sliding
        self._reference: deque[Tensor] = deque(maxlen=REFERENCE_READINGS)
        self._detector = DriftDetector(seed)

    def update(self, mean: Tensor) -> Drift | None:
        """For the mean embedding [d] of a batch; None while the reference is made."""
        now, result = mean.detach().double().cpu(), None
        full = len(self._reference) == REFERENCE_READINGS
        if full:
            distance = float((now - torch.stack(tuple(self._reference)).mean(0)).norm())
            statistic = self._detector.update(distance)
            result = Drift(statistic, distance, self._detector.readings_ago)
        if self._sliding or not full:
            self._reference.append(now)
        return result
