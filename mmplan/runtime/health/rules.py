"""All rules by monitor."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from mmplan.runtime.health import (
    attenuation,
    collapse,
    conflict,
    dispersion,
    drift,
    key_values,
    loss,
    overflow,
    retrieval,
    robustness,
    staleness,
    variance,
)
from mmplan.runtime.health.rule import Rule
from mmplan.scenario.document import did_you_mean, listed

RULES: Mapping[str, Rule] = {
    rule.monitor: rule
    for rule in (
        *(overflow.RULE, overflow.HEADROOM, staleness.STALE, staleness.JITTER, dispersion.RULE, collapse.RULE),
        *(attenuation.RULE, conflict.RULE, variance.RULE, key_values.RULE, retrieval.RULE, robustness.RULE),
        *(drift.RULE, loss.RULE),
    )
}


def chosen_rules(
    limits: Mapping[str, float] | None = None, fires: Mapping[str, Literal["above", "below"]] | None = None
) -> dict[str, Rule]:
    """The rules with other limits or directions.

    Raises:
        ValueError: there is no such monitor.
    """
    limits, fires = limits or {}, fires or {}
    for name in (*limits, *fires):
        if name not in RULES:
            raise ValueError(f"no monitor '{name}'{did_you_mean(name, RULES) or f'; there are {listed(RULES, 20)}'}")
    return {
        name: replace(rule, limit=limits.get(name, rule.limit), fires=fires.get(name, rule.fires))
        for name, rule in RULES.items()
    }
