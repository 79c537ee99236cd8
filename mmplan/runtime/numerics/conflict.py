"""When one modality's gradients suddenly outweigh another's: the ratio of two norms against its own recent past."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

_LEAST = 20  # a 95th percentile of fewer values is their maximum


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """`mean_a`, `mean_b`: of the norms in the window."""

    step: int
    ratio: float
    threshold: float
    norm_a: float
    norm_b: float
    mean_a: float
    mean_b: float

    def __str__(self) -> str:
        return (
            f"step {self.step}: norms {self.norm_a:.4g} and {self.norm_b:.4g}, ratio {self.ratio:.3g} above "
            f"{self.threshold:.3g} (means of the window {self.mean_a:.4g} and {self.mean_b:.4g})"
        )


class ConflictMonitor:
    """Tells when norm a / norm b is above the percentile of the `window` ratios before (an article's rule: 95th of 50).

    A steady ratio exceeds its own 95th percentile in about 5 % of steps: act on several conflicts in a row, not on one.
    """

    def __init__(self, *, window: int = 50, percentile: float = 95.0) -> None:
        if window < _LEAST or not 0 < percentile < 100:
            raise ValueError(f"window {window} is to be at least {_LEAST}, percentile {percentile} between 0 and 100")
        self._percentile, self._steps = percentile, 0
        self._norms: deque[tuple[float, float]] = deque(maxlen=window)

    def observe(self, norm_a: float, norm_b: float) -> Conflict | None:
        """The norms of a step; those that are no numbers, or 0 because a modality was absent, are left out."""
        self._steps += 1
        if not (np.isfinite((norm_a, norm_b)).all() and norm_a > 0 and norm_b > 0):
            return None
        found = self._conflict(norm_a, norm_b) if len(self._norms) >= _LEAST else None
        self._norms.append((norm_a, norm_b))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "norms": list(self._norms)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Of a longer window the last norms count."""
        self._steps = state_dict["steps"]
        self._norms = deque(map(tuple, state_dict["norms"]), maxlen=self._norms.maxlen)

    def _conflict(self, norm_a: float, norm_b: float) -> Conflict | None:
        threshold = float(np.percentile([a / b for a, b in self._norms], self._percentile))
        if norm_a / norm_b <= threshold:
            return None
        mean_a, mean_b = (fmean(norms) for norms in zip(*self._norms, strict=True))
        return Conflict(
            step=self._steps,
            ratio=norm_a / norm_b,
            threshold=threshold,
            norm_a=norm_a,
            norm_b=norm_b,
            mean_a=mean_a,
            mean_b=mean_b,
        )
