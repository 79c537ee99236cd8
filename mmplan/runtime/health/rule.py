"""When a monitor fires, who says so, and what to do then."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A limit on one number.

    `metric`: its definition; `source`: who set the limit; `certainty`: 1 where firing is a fact and no estimate, else
    how much a finding counts beside others (an order, no probability); `explains`: monitors that fire as a consequence,
    so that a cause is told before its symptoms; `patience`: readings in a row beyond the limit until it fires.
    """

    monitor: str
    metric: str
    unit: str
    limit: float
    fires: Literal["above", "below"]
    source: str
    advice: str
    certainty: float
    explains: tuple[str, ...] = ()
    patience: int = 1

    def beyond(self, value: float) -> bool:
        """Whether a value breaks the limit; one that is no number does where large ones would."""
        if math.isnan(value):
            return self.fires == "above"
        return value > self.limit if self.fires == "above" else value < self.limit
