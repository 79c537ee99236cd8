"""Published recipes as plans under our cost model: the degrees of the recipe, the best cut that these degrees have.

That is generous: frameworks cut stages by layer counts. What a recipe leaves open (see `Recipe`) is chosen as is best
for it, too. A recipe with several chunks per rank (`vp`) is cut into so many and runs as interleaved 1F1B (arXiv
2104.04473, section 2.2.2), or into one where that is faster by the closed form.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mmplan.errors import InfeasibleError, InputError, NoPlanFoundError
from mmplan.planner.cut_plan import StepTime
from mmplan.planner.explain import why_slower
from mmplan.planner.plan import Plan
from mmplan.planner.quantise import ROUNDING_GAP
from mmplan.planner.search import optimize
from mmplan.planner.stopping import TIME_LIMIT_S
from mmplan.scenario.recipe import Recipe
from mmplan.scenario.scenario import Scenario
from mmplan.units import format_seconds

RECIPE_GAP = 0.002  # with several chunks per rank: to prove the last of it takes minutes


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
    known = None if ours.placement and ours.certificate.status == "given" else ours  # else there is no closed form
    return tuple(plan_recipe(ours.scenario, recipe, known) for recipe in recipes)


def plan_recipe(scenario: Scenario, recipe: Recipe, ours: Plan | None = None) -> PlannedRecipe:
    """The best plan with the degrees of a recipe; refused recipes say why, with the arithmetic.

    Args:
        ours: a plan of the scenario that the reason compares with.
    """
    try:
        found = _in_its_chunks(scenario, recipe)
    except (InputError, InfeasibleError, NoPlanFoundError) as error:
        return PlannedRecipe(recipe=recipe, plan=None, reason=str(error))
    certificate = replace(found.certificate, bound_s=0.0, gap=1.0, status="given")
    plan, notes = replace(found, certificate=certificate), [_outside(scenario, recipe)]
    reason = "" if ours is None else _against(step_time(plan), step_time(ours))
    if recipe.technique:
        told = ", ".join(f"{name} {str(value).lower()}" for name, value in recipe.technique)
        notes.append(f"plans do not price {told}; mmplan fit does")
    if recipe.vp > 1:
        notes.append(_other_chunks(scenario, recipe, plan))
    return PlannedRecipe(recipe=recipe, plan=plan, reason=reason, note="; ".join(filter(None, notes)))


def pinned(scenario: Scenario, recipe: Recipe, chunks: tuple[int, ...] = (1,)) -> Scenario:
    """The scenario with constraints that leave the recipe's degrees alone; what the recipe leaves open stays as it is.

    Args:
        chunks: allowed per rank.

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
        scenario.constraints,
        **limits,
        dp=(_replicas(scenario, recipe),),
        vp=chunks,
        schedule=("1f1b", "interleaved"),
        spread=spread,
        patches=scenario.constraints.patches if recipe.spread is None else (),
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


def _in_its_chunks(scenario: Scenario, recipe: Recipe) -> Plan:
    """With the recipe's chunks per rank, or with one where so many cannot be made."""
    if recipe.vp > 1:
        with suppress(InfeasibleError, NoPlanFoundError):
            return optimize(pinned(scenario, recipe, (recipe.vp,)), gap=RECIPE_GAP, time_limit_s=TIME_LIMIT_S).plan
    return optimize(pinned(scenario, recipe), gap=0.0, time_limit_s=TIME_LIMIT_S).plan


def _other_chunks(scenario: Scenario, recipe: Recipe, plan: Plan) -> str:
    """The step of a recipe with several chunks per rank in one, or that of a recipe priced with one in several, or why
    it cannot be made."""
    chunks = 1 if plan.vp > 1 else recipe.vp
    try:
        other = optimize(pinned(scenario, recipe, (chunks,)), gap=RECIPE_GAP, time_limit_s=TIME_LIMIT_S).plan
    except (InfeasibleError, NoPlanFoundError) as error:
        each_s = [plan.microbatches * (stage.forward_s + stage.backward_s) + stage.finish_s for stage in plan.stages]
        busy = f"its ranks are busy for {format_seconds(sum(each_s) / len(each_s))} on average"
        return f"priced as 1F1B: in {recipe.vp} chunks per rank: {error}; {busy}" if chunks > 1 else ""
    step = format_seconds(other.certificate.objective_s)
    if chunks == 1:
        return f"under 1F1B instead of {recipe.vp} chunks per rank: {step}"
    return f"under 1F1B; in {recipe.vp} chunks per rank: {step}"


def step_time(plan: Plan) -> StepTime:
    """The terms of a plan's closed form."""
    plan = plan.one_chunk
    busiest_s = max(stage.forward_s + stage.backward_s for stage in plan.stages)
    repeat_s, finish_s = plan.vp * (plan.microbatches - 1) * busiest_s, max(stage.finish_s for stage in plan.stages)
    path_s = plan.certificate.objective_s - repeat_s - finish_s
    return StepTime(repeat_s=repeat_s, critical_path_s=path_s, finish_s=finish_s)
