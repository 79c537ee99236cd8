"""Published recipes as plans under our cost model: the degrees of the recipe, the best cut that these degrees have.

That is generous: frameworks cut stages by layer counts. What a recipe leaves open (see `Recipe`) is chosen as is best
for it, too. A recipe with several chunks per rank (`vp`) is cut into so many and runs as interleaved 1F1B (arXiv
2104.04473, section 2.2.2), or into one where that is faster by the closed form. Another schedule is made for the cut
that is best under 1F1B.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.errors import InfeasibleError, InputError, NoPlanFoundError
from mmplan.planner.cut_plan import StepTime
from mmplan.planner.explain import why_slower
from mmplan.planner.pins import Pins, broken_rule, overruled, unsearched
from mmplan.planner.pins import pinned as pinned_to
from mmplan.planner.plan import Plan
from mmplan.planner.quantise import ROUNDING_GAP
from mmplan.planner.search import optimize
from mmplan.planner.simulate import simulate
from mmplan.planner.stopping import TIME_LIMIT_S
from mmplan.scenario.recipe import PLANNED, Recipe
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.schedule_names import IN_TWO_CHUNKS
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


def plan_recipe(scenario: Scenario, recipe: Recipe, ours: Plan | None = None) -> PlannedRecipe:
    """The best plan with the degrees of a recipe; refused recipes say why, with the arithmetic.

    Args:
        ours: a plan of the scenario that the reason compares with.
    """
    try:
        found = _in_its_chunks(scenario, recipe)
    except (InputError, InfeasibleError, NoPlanFoundError) as error:
        return PlannedRecipe(recipe=recipe, plan=None, reason=str(error))
    certificate = replace(found.certificate, bound_s=0.0, gap=1.0, status="given", any_schedule_s=0.0)
    plan, notes = replace(found, certificate=certificate), []
    in_simulation = bool(found.placement) and found.certificate.status == "given"
    reason = "" if ours is None else _in_simulation(plan, ours) if in_simulation else _against(plan, ours)
    if recipe.vp > 1 and not in_simulation:
        notes.append(_other_chunks(scenario, recipe, plan))
    elif recipe.schedule not in (None, "1f1b", "gpipe", "interleaved") and not in_simulation:
        notes.append(f"the closed form is that of 1F1B; what {recipe.schedule} brings is in the simulated step")
    notes.append(_outside(scenario, recipe))
    if recipe.unpriced:
        told = ", ".join(f"{name} {str(value).lower()}" for name, value in recipe.unpriced)
        notes.append(f"plans do not price {told}; mmplan fit does")
    return PlannedRecipe(recipe=recipe, plan=plan, reason=reason, note="; ".join(filter(None, notes)))


def pinned(scenario: Scenario, recipe: Recipe, chunks: tuple[int, ...] = (1,)) -> Scenario:
    """The scenario with constraints that leave the recipe's degrees alone; what the recipe leaves open stays as it is.

    Args:
        chunks: allowed per rank.

    Raises:
        InputError: the degrees do not fit the cluster, the batch, the model or the devices.
    """
    said = _said(recipe)
    values: dict[str, tuple[Any, ...]] = {**said, "dp": _replicas(scenario, recipe), "vp": chunks}
    if reason := broken_rule(scenario, Pins(text=recipe.name, values=values)):
        raise InputError(reason)
    values["pp"] = (recipe.pp + sum(one.pp[0] for one in recipe.modules),)  # constraints count all stages of a plan
    values["schedule"] = ("1f1b", "interleaved") if recipe.schedule is None else (recipe.schedule,)
    values |= {"vp": ()} if recipe.schedule in IN_TWO_CHUNKS else {}  # made of the cut with one
    values |= {} if recipe.spread is None else {"patches": ()}
    own = dict(recipe.technique)
    replaced: dict[str, Any] = {key: "none" for key in ("sharding", "recompute", "offload") if key in said}
    if "recompute" in said:
        replaced["recompute_layers"] = None
    for key in ("sequence_parallel", "context_parallel"):
        if key in own:
            replaced[key] = own[key]
    technique = replace(scenario.technique, **replaced)
    return pinned_to(replace(scenario, technique=technique), Pins(text=recipe.name, values=values))


def _said(recipe: Recipe) -> dict[str, tuple[Any, ...]]:
    """What a recipe says of the keys that constraints have."""
    own = dict(recipe.technique)
    found: dict[str, tuple[Any, ...]] = {}
    for key in ("tp", "pp", "cp", "ep", "etp", "dp", "microbatch", "sharding", "recompute"):
        if (value := getattr(recipe, key)) is not None:
            found[key] = (value,)
    for key in PLANNED:
        if key in own and key != "context_parallel":
            found.setdefault(key, (own[key],))
    if recipe.spread is not None:
        found["spread"] = recipe.spread
    return {**found, "modules": recipe.modules}


def _outside(scenario: Scenario, recipe: Recipe) -> str:
    """Which of the scenario's own limits a recipe breaks, and which axes it has that a search takes only when asked:
    the plan that it is held against has neither."""
    values = {key: value for key, value in _said(recipe).items() if key != "spread"} | {"vp": (recipe.vp,)}
    values |= {"schedule": (recipe.schedule,)} if recipe.schedule is not None else {}
    pins, found = Pins(text=recipe.name, values=values), scenario.technique.context_parallel
    other = dict(recipe.technique).get("context_parallel", found) != found
    way = f"technique.context_parallel is {found}" if other else ""
    broken = " and ".join(filter(None, (overruled(scenario, pins), unsearched(scenario, pins), way)))
    return f"outside the scenario's constraints: {broken}" if broken else ""


def _against(plan: Plan, other: Plan) -> str:
    time, ours = step_time(plan), step_time(other)
    if abs(time.objective_s - ours.objective_s) <= ROUNDING_GAP * ours.objective_s:
        return "as fast"
    return why_slower(time, ours, faster="faster")


def _in_simulation(plan: Plan, ours: Plan) -> str:
    """Where the schedule of a recipe has no closed form."""
    step_s, our_s = (
        simulate(one, build_graph(one.scenario), AnalyticCostModel(one.scenario)).step_time_s for one in (plan, ours)
    )
    more_s = step_s - our_s
    if abs(more_s) <= ROUNDING_GAP * our_s:
        return "as fast in simulation"
    share = f"{format_seconds(abs(more_s))} ({abs(more_s) / our_s:.1%})"
    return f"{share} {'slower' if more_s > 0 else 'faster'} in simulation; {plan.schedule} has no closed form"


def _replicas(scenario: Scenario, recipe: Recipe) -> tuple[int, ...]:
    """The recipe's dp, or that which fills the cluster beside modules with ranks of their own; nothing where how many
    ranks these have is left open."""
    beside = _own_ranks(recipe)
    if beside is None and recipe.dp is None:
        return ()
    have, width = scenario.cluster.device_count - (beside or 0), recipe.tp * recipe.cp * recipe.pp
    product = f"tp={recipe.tp} x cp={recipe.cp} x pp={recipe.pp}"
    of_cluster = f"{have} of the cluster" if not beside else f"{have} that {beside} of modules apart leave"
    if recipe.dp is None and have % width:
        raise InputError(f"{product} = {width} devices do not divide the {of_cluster}: dp = {have / width:g}")
    dp = recipe.dp if recipe.dp is not None else have // width
    if width * dp > have:
        left = f"the cluster has {have}" if not beside else f"the cluster has {have} beside {beside} of modules apart"
        raise InputError(f"{product} x dp={dp} = {width * dp} devices, {left}")
    samples = dp * (recipe.microbatch or 1)
    if scenario.global_batch % samples:
        size = f" x {recipe.microbatch} samples" if recipe.microbatch else ""
        whole = f"global batch {scenario.global_batch} / (dp={dp}{size}) = {scenario.global_batch / samples:g}"
        raise InputError(f"{whole}: no whole number of microbatches")
    return (dp,)


def _own_ranks(recipe: Recipe) -> int | None:
    """Ranks of modules with meshes of their own; None where some dp is left open."""
    if not all(one.dp for one in recipe.modules):
        return None
    return sum(one.tp[0] * one.cp[0] * one.dp[0] * one.pp[0] for one in recipe.modules)


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
