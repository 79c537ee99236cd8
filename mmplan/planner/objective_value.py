"""What a plan is worth by an objective, less is better: of a whole step, which is the same order as of a token."""

from collections.abc import Callable
from dataclasses import dataclass

from mmplan.planner.objective import ObjectiveName
from mmplan.planner.plan import Plan
from mmplan.planner.plan_cost import cost_of
from mmplan.planner.result import OptimizeResult
from mmplan.units import format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """`says`: what a value is; `text`: one as text."""

    says: str
    text: Callable[[float], str]


_STEP = Measure(says="step time", text=format_seconds)
MEASURES: dict[ObjectiveName, Measure] = {
    "step-time": _STEP,
    "p90-time": _STEP,  # which chooses among plans of about the same mean step
    "device-time": Measure(says="device time of a step", text=format_seconds),
    "cost": Measure(says="cost of a step", text=lambda cost: f"{cost:,.4g}"),
    "devices": Measure(says="devices", text=lambda count: f"{count:,.0f}"),
}


def plan_value(plan: Plan, step_s: float, objective: ObjectiveName) -> float:
    """Of a plan whose step takes so long; by cost every rank that works has a price."""
    match objective:
        case "device-time":
            return plan.rank_count * step_s
        case "cost":
            cost = cost_of(plan, step_s)
            assert cost is not None  # the search needs all prices
            return cost.per_step
        case "devices":
            return float(plan.rank_count)
    return step_s


def result_values(result: OptimizeResult, objective: ObjectiveName) -> tuple[float, float]:
    """Of a searched plan, by its closed form, and what no plan is below."""
    plan = result.plan
    value = plan_value(plan, plan.certificate.objective_s, objective)
    if result.fewer is not None:
        return value, float(result.fewer.least)
    return value, plan_value(plan, plan.certificate.bound_s, objective)
