"""The loss itself: a symptom. It is told last, behind whatever explains it.

A batch of two has losses that differ by more than a factor, so a rise is held against the run's own noise, by ranks
alone: of losses drawn alike, of whatever law, how probable is it that the last 20 stand so high among those of a block
of 50 before? (The exact test of Mann and Whitney, Annals of Mathematical Statistics 1947.) The block is the one with
the least median so far, or the present one; p-values are multiplied by the number of blocks. With losses that are drawn
alike, or independent and falling, the mean number of false alarms a step is therefore at most 1 / limit. Losses of
steps near each other are not quite independent: an excursion of ten steps that goes back is too short to fire. The
test says nothing of how much was lost, so the rise must also be a fifth of the block's level and a tenth of what
the run had gained.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from mmplan.runtime.health.judge import Value
from mmplan.runtime.health.rule import Rule

RULE = Rule(
    monitor="loss",
    metric="1 / p of the Mann-Whitney test: that the last 20 losses stand so high among the best 50 before, by chance; "
    "counts where their median is a fifth higher as well; infinite where a loss is no number",
    unit="evidence",
    limit=1_000_000.0,
    fires="above",
    source="ours: on average at most one false alarm in a million steps whose losses are drawn alike or fall",
    advice="lower the learning rate or raise the warm-up, and look at the batches of these steps",
    certainty=0.3,
)

RECENT, BLOCK = 20, 50  # an excursion as long as momentum of 0.9 remembers, ten steps, is half of the recent ones
LEAST_BLOCK = 10  # 1 / p is 30 million where the last 20 stand above 10
LEAST_RISE, LEAST_LOST = 0.2, 0.1  # ours: of the level, and of what was gained since the first losses
FIRST = 3


class LossRise(NamedTuple):
    """The evidence, the median of the last losses and of those before, and whether it rose far enough to count."""

    evidence: float
    recent: float
    before: float
    counts: bool

    def value(self, loss: float) -> Value:
        detail: dict[str, float | str | None] = {"loss": loss, "last": self.recent, "before": self.before}
        return Value(RULE.monitor, "loss", self.evidence, detail, "rank", self.counts)


class LossWatch:
    """Takes the losses of steps one by one."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._block: list[float] = []
        self._best: list[float] = []
        self._blocks = 0
        self._start = 0.0

    def update(self, loss: float) -> LossRise | None:
        """None before there are enough losses."""
        if len(self._recent) == RECENT:
            self._into_block(self._recent[0])
        self._recent.append(loss)
        rises = [self._rise(block) for block in (self._best, self._block) if len(block) >= LEAST_BLOCK]
        return max(rises, key=lambda rise: (rise.counts, rise.evidence)) if rises else None

    def _into_block(self, loss: float) -> None:
        if len(self._block) == BLOCK:
            if not self._best or median(self._block) < median(self._best):
                self._best = self._block
            self._block = []
            self._blocks += 1
        self._block.append(loss)
        if not self._blocks and len(self._block) == FIRST:
            self._start = median(self._block)

    def _rise(self, block: Sequence[float]) -> LossRise:
        level, recent = median(block), median(self._recent)
        least = max(LEAST_RISE * abs(level), LEAST_LOST * (self._start - level))
        p = rank_p(self._recent, block) * (self._blocks + 1)
        return LossRise(1 / min(p, 1.0), recent, level, recent - level > least)


def rank_p(recent: Sequence[float], block: Sequence[float]) -> float:
    """P(of losses drawn alike, at least so many pairs have the loss of `recent` above that of `block`); ties count
    against a rise."""
    ordered = sorted(block)
    short = len(recent) * len(block) - sum(bisect_left(ordered, loss) for loss in recent)
    return _orders(len(recent), len(block))[short] / math.comb(len(recent) + len(block), len(recent))


@cache
def _orders(few: int, many: int) -> list[int]:
    """How many orders of the two samples lack at most 0, 1, 2 ... pairs: sums of coefficients of the product over i of
    (1 - q^(many + i)) / (1 - q^i)."""
    counts = [1] + [0] * (few * many)
    for i in range(1, few + 1):
        for power in range(few * many, many + i - 1, -1):
            counts[power] -= counts[power - many - i]
        for power in range(i, few * many + 1):
            counts[power] += counts[power - i]
    return list(accumulate(counts))
