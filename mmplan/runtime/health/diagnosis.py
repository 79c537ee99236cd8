"""From readings to findings: what is wrong, the cause before its symptoms.

A finding follows from another where that monitor's rule explains it and went beyond its limit no later. What follows
stands behind what does not; then the more certain comes first, then the earlier.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mmplan.runtime.health.readings import BEGAN, Reading
from mmplan.runtime.health.rule import Rule
from mmplan.scenario.document import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """`began`: the first step beyond the limit; `last`: the last one; `readings`: how many were beyond it; `value`: the
    first that fired. `follows`: the monitor whose finding explains this one, "" where none does."""

    monitor: str
    of: str
    began: int
    last: int
    readings: int
    value: float | None
    limit: float
    certainty: float
    follows: str
    evidence: str
    advice: str
    source: str
    detail: dict[str, float | str | None]


def diagnose(readings: Iterable[Reading], rules: Mapping[str, Rule]) -> tuple[Finding, ...]:
    """Findings of a run, the cause first.

    Args:
        readings: by step; monitors that `rules` does not have are left out, they are another version's.
    """
    series: dict[tuple[str, str], list[Reading]] = {}
    for reading in readings:
        if reading.monitor in rules:
            series.setdefault((reading.monitor, reading.of), []).append(reading)
    found = [_finding(rows, rules[monitor]) for (monitor, _), rows in series.items() if any(r.fired for r in rows)]
    linked = [replace(one, follows=_cause(one, found, rules)) for one in found]
    return tuple(sorted(linked, key=lambda one: (bool(one.follows), -one.certainty, one.began, one.monitor, one.of)))


def _finding(rows: Sequence[Reading], rule: Rule) -> Finding:
    place = next(index for index, row in enumerate(rows) if row.fired)
    fired, began = rows[place], place
    while began > 0 and rows[began - 1].beyond:
        began -= 1
    beyond = [row for row in rows if row.beyond]
    value = str(fired.detail.get("value", "no number")) if fired.value is None else f"{fired.value:.4g}"
    if rule.certainty == 1.0 and rule.limit == 0.0:
        measured = f"{rule.unit}: {value}"
    else:
        measured = f"{value} {rule.unit}, limit {fired.limit:g}"
    told_step = fired.detail.get(BEGAN)
    step = round(told_step) if isinstance(told_step, float) else rows[began].step
    steps = f"since step {step}, in {len(beyond)} of {counted(len(rows), 'reading')}"
    told = ", ".join(f"{key} {_shown(item)}" for key, item in fired.detail.items() if key not in ("value", BEGAN))
    return Finding(
        monitor=rule.monitor,
        of=fired.of,
        began=step,
        last=beyond[-1].step,
        readings=len(beyond),
        value=fired.value,
        limit=fired.limit,
        certainty=rule.certainty,
        follows="",
        evidence=f"{measured}, {steps}" + (f"; {told}" if told else ""),
        advice=rule.advice,
        source=rule.source,
        detail=fired.detail,
    )


def _cause(one: Finding, found: Sequence[Finding], rules: Mapping[str, Rule]) -> str:
    """The most certain monitor that explains a finding."""
    causes = [
        other
        for other in found
        if one.monitor in rules[other.monitor].explains
        and (other.began, other is one) < (one.began, True)
        and (other.monitor != one.monitor or other.began < one.began)
    ]
    return max(causes, key=lambda other: other.certainty).monitor if causes else ""


def _shown(item: float | str | None) -> str:
    return f"{item:.4g}" if isinstance(item, float) else str(item)
