"""Published recipes as plans under our cost model: the degrees of the recipe, the best cut that these degrees have.

That is generous: frameworks cut stages by layer counts. What a recipe leaves open (see `Recipe`) is chosen as is best
for it, too. Chunks per rank (`vp`) are outside the closed form: the plan is cut into so many and run as interleaved
1F1B (arXiv 2104.04473, section 2.2.2), where that is faster; then its closed form is the makespan of that schedule.
"""

from dataclasses import dataclass, replace
from typing import Any

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.layout import RECOMPUTE_LEVELS
from mmplan.errors import InfeasibleError, InputError, NoPlanFoundError
from mmplan.planner.cut_plan import StepTime
from mmplan.planner.explain import why_slower
from mmplan.planner.plan import Plan
from mmplan.planner.problem import allowed_levels
from mmplan.planner.schedules.chunks import chunked_plan
from mmplan.planner.schedules.problem import NotApplicable
from mmplan.planner.schedules.reschedule import with_family
from mmplan.planner.search import ROUNDING_GAP, optimize
from mmplan.planner.stopping import TIME_LIMIT_S
from mmplan.scenario.scenario import Recipe, Scenario
from mmplan.units import format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRecipe:
    """A recipe with its plan, or with the reason why there is none.

    `reason` of a plan: its terms against another plan's, both under 1F1B; empty without another. `note`: what of the
    recipe is priced in another way than it says, and limits of the scenario that it breaks.
    """

    recipe: Recipe
    plan: Plan | None
    reason: str
    note: str = ""


def plan_recipes(ours: Plan) -> tuple[PlannedRecipe, ...]:
    """The recipes of a plan's scenario, each against the plan.

    Raises:
        InputError: the scenario names none.
    """
    recipes = ours.scenario.recipes
    if not recipes:
        raise InputError(f"{ours.scenario.name} names no recipes: write them under its key 'recipes' and plan it anew")
    one_each = None if ours.placement else ours  # the terms of the closed form are those of one stage per rank
    return tuple(plan_recipe(ours.scenario, recipe, one_each) for recipe in recipes)


def plan_recipe(scenario: Scenario, recipe: Recipe, ours: Plan | None = None) -> PlannedRecipe:
    """The best plan with the degrees of a recipe; refused recipes say why, with the arithmetic.

    Args:
        ours: a plan of the scenario that the reason compares with.
    """
    try:
        found = optimize(pinned(scenario, recipe), gap=0.0, time_limit_s=TIME_LIMIT_S).plan
    except (InputError, InfeasibleError, NoPlanFoundError) as error:
        return PlannedRecipe(recipe=recipe, plan=None, reason=str(error))
    certificate = replace(found.certificate, bound_s=0.0, gap=1.0, status="given")
    plan, notes = replace(found, certificate=certificate), [_outside(scenario, recipe)]
    reason = "" if ours is None else _against(step_time(plan), step_time(ours))
    if recipe.technique:
        told = ", ".join(f"{name} {str(value).lower()}" for name, value in recipe.technique)
        notes.append(f"plans do not price {told}; mmplan fit does")
    if recipe.vp > 1:
        plan, note = _interleaved(plan, recipe.vp)
        notes.append(note)
    return PlannedRecipe(recipe=recipe, plan=plan, reason=reason, note="; ".join(filter(None, notes)))


def pinned(scenario: Scenario, recipe: Recipe) -> Scenario:
    """The scenario with constraints that leave the recipe's degrees alone; what the recipe leaves open stays as it is.

    Raises:
        InputError: the degrees do not fit the cluster or the batch.
    """
    technique = scenario.technique
    if recipe.sharding is not None:
        technique = replace(technique, sharding="none")
    if recipe.recompute is not None:
        technique = replace(technique, recompute="none", recompute_layers=None)
    limits: dict[str, Any] = {name: (value,) for name, value in _written(recipe).items()}
    spread = scenario.constraints.spread if recipe.spread is None else recipe.spread
    rules = replace(
        scenario.constraints, **limits, dp=(_replicas(scenario, recipe),), schedule=("1f1b",), spread=spread
    )
    return replace(scenario, technique=technique, constraints=rules)


def _written(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says of the keys that constraints have, dp and spread aside."""
    keys = ("tp", "pp", "cp", "ep", "etp", "microbatch", "sharding", "recompute")
    return {key: value for key in keys if (value := getattr(recipe, key)) is not None}


def _outside(scenario: Scenario, recipe: Recipe) -> str:
    """Which of the scenario's own limits a recipe breaks: those bind plans of the search alone."""
    rules = scenario.constraints
    broken = [
        f"{key} {value}" for key, value in _written(recipe).items() if value not in (getattr(rules, key) or (value,))
    ]
    return f"outside the scenario's constraints: {', '.join(broken)}" if broken else ""


def _against(time: StepTime, ours: StepTime) -> str:
    if abs(time.objective_s - ours.objective_s) <= ROUNDING_GAP * ours.objective_s:
        return "as fast"
    return why_slower(time, ours, faster="faster")


def _replicas(scenario: Scenario, recipe: Recipe) -> int:
    """The recipe's dp, or that which fills the cluster."""
    have, width = scenario.cluster.device_count, recipe.tp * recipe.cp * recipe.pp
    product = f"tp={recipe.tp} x cp={recipe.cp} x pp={recipe.pp}"
    if recipe.dp is None and have % width:
        raise InputError(f"{product} = {width} devices do not divide the {have} of the cluster: dp = {have / width:g}")
    dp = recipe.dp if recipe.dp is not None else have // width
    if width * dp > have:
        raise InputError(f"{product} x dp={dp} = {width * dp} devices, the cluster has {have}")
    samples = dp * (recipe.microbatch or 1)
    if scenario.global_batch % samples:
        size = f" x {recipe.microbatch} samples" if recipe.microbatch else ""
        whole = f"global batch {scenario.global_batch} / (dp={dp}{size}) = {scenario.global_batch / samples:g}"
        raise InputError(f"{whole}: no whole number of microbatches")
    return dp


def _interleaved(plan: Plan, chunks: int) -> tuple[Plan, str]:
    """The plan in so many chunks per rank, its stages recomputing alike and as little as fits, and its step under 1F1B;
    the plan as it is and the reason where there is none."""
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    least = max(RECOMPUTE_LEVELS.index(stage.recompute) for stage in plan.stages)
    reason = ""
    for level in allowed_levels(plan.scenario):
        if RECOMPUTE_LEVELS.index(level) < least:
            continue
        alike = replace(plan, stages=tuple(replace(stage, recompute=level) for stage in plan.stages))
        chunked = chunked_plan(alike, graph, costs, chunks, v_shaped=False)
        if isinstance(chunked, NotApplicable):
            return plan, _priced_as_1f1b(plan, chunked.reason)
        choice = with_family(chunked, "interleaved", graph, costs)
        if choice.plan is not None and choice.fits:
            return _faster(plan, choice.plan, chunks)
        reason = choice.reason
    return plan, _priced_as_1f1b(plan, f"in {chunks} chunks per rank {reason}")


def _priced_as_1f1b(plan: Plan, reason: str) -> str:
    """With the part of the step that no other order could save."""
    each_s = [plan.microbatches * (stage.forward_s + stage.backward_s) + stage.finish_s for stage in plan.stages]
    busy = f"its ranks are busy for {format_seconds(sum(each_s) / len(each_s))} on average"
    return f"priced as 1F1B: {reason}; {busy}"


def _faster(one_each: Plan, chunked: Plan, chunks: int) -> tuple[Plan, str]:
    """The faster of two plans of a recipe, and the other one's step: chunks recompute alike, which can cost more than
    they save."""
    seconds = [format_seconds(plan.certificate.objective_s) for plan in (one_each, chunked)]
    if chunked.certificate.objective_s <= one_each.certificate.objective_s:
        return chunked, f"under 1F1B instead of {chunks} chunks per rank: {seconds[0]}"
    return one_each, f"under 1F1B; in {chunks} chunks per rank: {seconds[1]}"


def step_time(plan: Plan) -> StepTime:
    """The terms of the closed form of a plan with one stage per rank."""
    busiest_s = max(stage.forward_s + stage.backward_s for stage in plan.stages)
    repeat_s, finish_s = (plan.microbatches - 1) * busiest_s, max(stage.finish_s for stage in plan.stages)
    path_s = plan.certificate.objective_s - repeat_s - finish_s
    return StepTime(repeat_s=repeat_s, critical_path_s=path_s, finish_s=finish_s)
