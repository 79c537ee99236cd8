"""Values of monitors become readings: a limit broken for as many readings in a row as its rule asks."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mmplan.runtime.health.readings import Reading, finite_or_none
from mmplan.runtime.health.rule import Rule

Known = Literal["rank", "stage", "run"]


@dataclass(frozen=True, slots=True)
class Value:
    """What a monitor measured of something, and who knows it: this rank alone, all ranks of its stage, or all.
    `holds`: what else has to be so that a value beyond its limit counts."""

    monitor: str
    of: str
    value: float
    detail: dict[str, float | str | None] = field(default_factory=dict)
    known: Known = "run"
    holds: bool = True


class Judge:
    """Counts how often in a row each value was beyond its limit."""

    def __init__(self, rules: Mapping[str, Rule], rank: int) -> None:
        self._rules, self._rank = rules, rank
        self._beyond: dict[tuple[str, str], int] = {}

    def reading(self, step: int, value: Value) -> Reading:
        rule, key = self._rules[value.monitor], (value.monitor, value.of)
        self._beyond[key] = self._beyond.get(key, 0) + 1 if value.holds and rule.beyond(value.value) else 0
        number = finite_or_none(value.value)
        detail = dict(value.detail) if number is not None else {**value.detail, "value": str(value.value)}
        return Reading(
            step=step,
            time_s=time.time(),
            rank=self._rank,
            monitor=value.monitor,
            of=value.of,
            value=number,
            limit=rule.limit,
            beyond=self._beyond[key] > 0,
            fired=self._beyond[key] >= (1 if math.isnan(value.value) else rule.patience),
            detail={k: finite_or_none(v) if isinstance(v, float) else v for k, v in detail.items()},
        )
