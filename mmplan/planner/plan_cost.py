"""What a plan costs where its cluster has prices: of the ranks that work, for as long as a step takes."""

from collections import Counter
from dataclasses import dataclass

from mmplan.cost_models.loads import mean_loads
from mmplan.planner.plan import Plan
from mmplan.scenario.scenario import Scenario
from mmplan.units import S_PER_HOUR

MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """In the currency of the prices; of tokens None where nobody knows how many a step has."""

    per_step: float
    per_million_tokens: float | None


def cost_of(plan: Plan, step_s: float) -> Cost | None:
    """Of steps of so many seconds; None where a rank that works has no price. Idle ranks cost nothing."""
    price = price_per_hour(plan)
    if price is None:
        return None
    per_step = price / S_PER_HOUR * step_s
    tokens = tokens_of(plan.scenario)
    return Cost(per_step=per_step, per_million_tokens=per_step / tokens * MILLION if tokens else None)


def price_per_hour(plan: Plan) -> float | None:
    """Of all ranks that work; None where one of them has no price."""
    cluster, total = plan.scenario.cluster, 0.0
    first = [plan.stages_of(row)[0] for row in range(plan.pp)]
    ranks = Counter(cluster.pool_of(rank).price_per_hour for stage in first for rank in plan.stage_ranks(stage))
    for price, count in ranks.items():
        if price is None:
            return None
        total += price * count
    return total


def tokens_of(scenario: Scenario) -> float:
    """Of a mean step: those of the language models, where there is none of all modules; 0 where nobody knows."""
    if scenario.model.recorded is not None:
        return 0.0  # samples were recorded as a whole
    languages = [module.name for module in scenario.model.modules if module.kind == "language_model"]
    loads = mean_loads(scenario, 1)
    return scenario.global_batch * sum(loads[module].tokens for module in languages or loads)
