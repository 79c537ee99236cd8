"""One answer of `optimize --why-not`."""

from dataclasses import dataclass
from typing import Literal

from mmplan.planner.plan import Plan

Verdict = Literal["chosen", "slower", "within the gap", "excluded", "out of memory", "not found"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """One answer. Seconds are None where there is no plan.

    `objective_s`, `bound_s`: closed form of the best plan with these degrees, and what none of them is below. Each
    `*_more_s` is a term of its step minus the winner's (see `RunnerUp`); `stage_more_s` splits the first by what the
    busiest stage does.
    """

    asked: str
    verdict: Verdict
    reason: str
    plan: Plan | None = None
    objective_s: float | None = None
    bound_s: float | None = None
    repeat_more_s: float | None = None
    fill_more_s: float | None = None
    finish_more_s: float | None = None
    stage_more_s: dict[str, float] | None = None
