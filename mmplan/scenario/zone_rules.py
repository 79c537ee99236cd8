"""Which layers of a modality are sensitive, by the values of them all.

`percentile:85`: above the 85th percentile (the threshold of the published no-split zones); `top:3`: the three largest;
`above:2.5`: larger than a number; `gap`: what lies above the widest relative step between two neighbours in order of
size, if the upper one is at least twice the lower: a set without such a step has no layer that stands out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

PERCENTILE = 85.0
LEAST_STEP = 2.0  # of `gap`; a factor that batches of a few samples do not move a value by

_FORMS = "percentile:85, top:3, above:2.5 or gap"


@dataclass(frozen=True, kw_only=True, slots=True)
class ZoneRule:
    kind: Literal["percentile", "top", "above", "gap"]
    number: float = 0.0

    def __str__(self) -> str:
        return self.kind if self.kind == "gap" else f"{self.kind}:{self.number:g}"

    def sensitive(self, values: Mapping[str, float]) -> set[str]:
        """The layers that stand out of the values of one modality."""
        limit = self._limit(sorted(values.values()))
        return {layer for layer, value in values.items() if value > limit}

    def _limit(self, ordered: list[float]) -> float:
        """Sensitive is what is larger."""
        match self.kind:
            case "percentile":
                return _percentile(ordered, self.number) if ordered else math.inf
            case "above":
                return self.number
            case "top":
                count = int(self.number)
                return -math.inf if count >= len(ordered) else ordered[-1 - count]
            case "gap":
                return _widest_step(ordered)


DEFAULT_RULE = ZoneRule(kind="percentile", number=PERCENTILE)


def parse_rule(text: str) -> ZoneRule:
    """A rule as it is written; ValueError says what is wrong.

    Ties at the limit are no zone: of equal values none stands out.
    """
    kind, _, number = text.strip().partition(":")
    if kind == "gap" and not number:
        return ZoneRule(kind="gap")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if kind == "percentile" and 0 <= value < 100:
        return ZoneRule(kind="percentile", number=value)
    if kind == "top" and value >= 1 and value == int(value):
        return ZoneRule(kind="top", number=value)
    if kind == "above" and math.isfinite(value):
        return ZoneRule(kind="above", number=value)
    raise ValueError(f"'{text}' is no rule: expected {_FORMS}")


def _percentile(ordered: list[float], percent: float) -> float:
    """By linear interpolation between the two nearest values (numpy's default)."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _widest_step(ordered: list[float]) -> float:
    """The lower value of the widest step by ratio; steps from values that are not positive do not count."""
    steps = [(high / low, low) for low, high in pairwise(ordered) if low > 0]
    ratio, low = max(steps, default=(1.0, math.inf))
    return low if ratio >= LEAST_STEP else math.inf
