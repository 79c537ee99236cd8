"""How far a step time may be off, from the ranges of the numbers it is computed from.

Each number is moved to its P10 and to its P90, all others held; the logarithms of the step times that result are the
sides of its influence. Influences of independent numbers add in squares, each side on its own, so a wider range of any
number never narrows the result. What no number explains, the form of the model, has an influence of its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.time_rules import Rules, pool_rules
from mmplan.cost_models.uncertainty import Uncertain, uncertain_numbers, with_number
from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import cut_stages
from mmplan.planner.degrees import Degrees
from mmplan.planner.estimate import StepEstimator
from mmplan.planner.plan import Plan
from mmplan.planner.pricing import Prices
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.stacks import parameter_origins

Seconds = Callable[..., float]  # of the rules of each pool

# Half width, in the logarithm, that the form of the model adds to the ranges of its numbers: with it 80 % of the
# shipped rows of sources that were never fitted lie inside P10-P90; on a software stack without measured rows the same
# of all rows, each under a fit that has not seen its group of sources (benchmarks/intervals.py).
MODEL_ERROR, UNSEEN_MODEL_ERROR = 0.065, 0.13

_LEAST_INFLUENCE = 1e-6  # of the logarithm; below that a number has no part in this step


@dataclass(frozen=True, kw_only=True, slots=True)
class Influence:
    """What one number's range does to the step: it may be up to `slower` longer or `faster` shorter (fractions)."""

    number: Uncertain
    slower: float
    faster: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInterval:
    """The step time lies between `p10_s` and `p90_s` in 8 of 10 cases; influences, the largest first."""

    step_s: float
    p10_s: float
    p90_s: float
    influences: tuple[Influence, ...]


def step_interval(
    step_s: float, rules: tuple[Rules, ...], seconds: Seconds, *, model_error: float | None = None
) -> StepInterval:
    """The interval around `step_s`.

    A number that several pools have is one number: it moves in all of them.

    Args:
        rules: of each pool.
        seconds: step time under other rules, one argument for each pool; may be a closed form where `step_s` was
            simulated, for only its relative changes count.
        model_error: by default that of the software stack.
    """
    if model_error is None:
        seen = any(origin.kind == "fitted" for origin in parameter_origins(rules[0].technique.stack))
        model_error = MODEL_ERROR if seen else UNSEEN_MODEL_ERROR
    base_s, of_pool = seconds(*rules), [frozenset(uncertain_numbers(one)) for one in rules]
    influences = [_of_the_model(model_error)]
    slower = faster = model_error**2
    for number in dict.fromkeys(number for one in rules for number in uncertain_numbers(one)):
        having = [(one, number in numbers) for one, numbers in zip(rules, of_pool, strict=True)]
        ends_s = (
            seconds(*(with_number(one, number, end) if has else one for one, has in having))
            for end in (number.p10, number.p90)
        )
        logs = [math.log(end_s / base_s) for end_s in ends_s] if base_s > 0 else [0.0]
        more, less = max(0.0, *logs), max(0.0, *(-log for log in logs))
        slower, faster = slower + more**2, faster + less**2
        if max(more, less) > _LEAST_INFLUENCE:
            influences.append(Influence(number=number, slower=math.expm1(more), faster=-math.expm1(-less)))
    return StepInterval(
        step_s=step_s,
        p10_s=step_s * math.exp(-math.sqrt(faster)),
        p90_s=step_s * math.exp(math.sqrt(slower)),
        influences=tuple(sorted(influences, key=lambda one: -(one.slower + one.faster))),
    )


def _of_the_model(error: float) -> Influence:
    form = Uncertain(
        owner="model",
        of="cost model",
        parameter="form",
        kind="fitted",
        value=1.0,
        p10=math.exp(-error),
        p90=math.exp(error),
    )
    return Influence(number=form, slower=math.expm1(error), faster=-math.expm1(-error))


def plan_interval(plan: Plan, step_s: float) -> StepInterval:
    """The interval of a plan's simulated step, by the closed form of its stages."""
    scenario = plan.scenario
    prices = Prices(scenario, build_graph(scenario), AnalyticCostModel(scenario))
    stages = range(len(plan.stages))
    laid_round = len(stages) == plan.pp * plan.vp and not plan.meshes
    configuration = Configuration(
        tp=plan.tp,
        cp=plan.cp,
        ep=plan.ep,
        etp=plan.etp,
        sharding=plan.sharding,
        spread=plan.spread,
        patches=plan.patches,
        together=plan.together,
        batch_factor=plan.batch_factor,
        prefetch=plan.prefetch,
        dp=plan.dp,
        pp=plan.pp,
        vp=plan.vp if laid_round else 1,
        microbatch_size=plan.microbatch_size,
        microbatches=plan.microbatches,
        meshes=plan.meshes,
        mesh_stages=tuple(len({plan.row(s) for s in stages if plan.mesh(s) == mesh}) for mesh in plan.meshes),
        schedule="1f1b",  # others move the same seconds about; only relative changes count here
    )

    layers, levels = [stage.layers for stage in plan.stages], [stage.recompute for stage in plan.stages]

    def seconds(*rules: Rules) -> float:
        moved = prices.with_costs(AnalyticCostModel(scenario, rules))
        return cut_stages(moved, configuration, layers, levels)[1].objective_s

    return step_interval(step_s, pool_rules(scenario), seconds)


def estimate_interval(scenario: Scenario, degrees: Degrees) -> StepInterval:
    """The interval of one configuration's estimated step."""
    estimator = StepEstimator(scenario)

    def seconds(rules: Rules) -> float:
        return estimator.with_rules(rules).estimate(degrees).step_s

    return step_interval(estimator.estimate(degrees).step_s, (estimator.rules,), seconds)
