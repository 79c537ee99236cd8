"""The loss itself: a symptom. It is told last, behind whatever explains it."""

from collections import deque

from mmplan.runtime.health.rule import Rule

RULE = Rule(
    monitor="loss",
    metric="median of the last 5 losses over the least such median so far; infinite where a loss is no number",
    unit="ratio",
    limit=2.0,
    fires="above",
    source="ours: twice the best",
    advice="lower the learning rate or raise the warm-up, and look at the batches of these steps",
    certainty=0.3,
    patience=3,
)

_WINDOW = 5
_FLOOR = 1e-2  # a loss of nearly nothing may double


class LossRatio:
    """Takes the losses of steps one by one."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_WINDOW)
        self._best = float("inf")

    def update(self, loss: float) -> float | None:
        """The ratio, None before there are enough losses and where losses are negative."""
        self._last.append(loss)
        if len(self._last) < _WINDOW:
            return None
        median = sorted(self._last)[_WINDOW // 2]
        if median < 0:
            return None
        self._best = min(self._best, max(median, _FLOOR))
        return max(median, _FLOOR) / self._best
