"""The configuration that the field's rule of thumb gives a job, for scenarios for which nobody published one.

Megatron's guidance (arXiv 2104.04473, takeaways 1 and 2 of section 3): tensor parallelism up to the devices of a node,
pipeline stages beyond that, no more of either than make the model fit, replicas for the rest; and of Megatron Core's
parallelism guide: the optimizer's state over the replicas, sequences beyond 8,192 tokens over context ranks, experts
over the devices of a node before tensor parallelism splits them. What fits may recompute or not: the quicker of the two
is taken, with the best microbatch, cut and spread encoders, which is generous.
"""

from collections.abc import Iterator
from dataclasses import replace

from mmplan.cost_models.degrees import tp_degrees
from mmplan.errors import InfeasibleError, InputError
from mmplan.planner.configuration import divisors
from mmplan.planner.configurations import context_degrees, expert_degrees, mean_rows
from mmplan.planner.first_bounds import NEVER
from mmplan.planner.frontier import Frontier
from mmplan.planner.plan import Plan
from mmplan.planner.recipes import PlannedRecipe, pinned, plan_recipe
from mmplan.planner.space import build_space
from mmplan.scenario.recipe import Recipe
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.technique import Sharding

RULE = "rule of thumb"
SOURCE = (
    "arXiv 2104.04473, takeaways 1 and 2, and Megatron Core's parallelism guide: tp inside a node, then stages, as few "
    "as fit; ZeRO-1, cp beyond 8,192 tokens, experts over a node"
)
LONGEST = 8192  # tokens of a sequence on one rank


def plan_experts(ours: Plan) -> tuple[PlannedRecipe, ...]:
    """The recipes that a plan's scenario names and the rule of thumb, each against the plan."""
    known = None if ours.placement and ours.certificate.status == "given" else ours  # else there is no closed form
    named = (plan_recipe(ours.scenario, recipe, known) for recipe in ours.scenario.recipes)
    return *named, plan_by_rule(ours.scenario, known)


def plan_by_rule(scenario: Scenario, ours: Plan | None = None) -> PlannedRecipe:
    """The rule's configuration as a recipe with its plan, or with the reason why there is none.

    Args:
        ours: a plan of the scenario that the reason compares with.
    """
    made = [plan_recipe(scenario, recipe, ours) for recipe in by_rule(scenario)]
    plans = [(one.plan.certificate.objective_s, one) for one in made if one.plan is not None]
    if plans:
        return min(plans, key=lambda pair: pair[0])[1]
    if made:
        return made[0]
    reason = "no tp inside a node and no number of stages that use the whole cluster fit into memory"
    return PlannedRecipe(recipe=Recipe(name=RULE, source=SOURCE), plan=None, reason=reason)


def by_rule(scenario: Scenario) -> tuple[Recipe, ...]:
    """The first degrees of the rule's order that fit, and the first that fit without recomputation; one where these are
    the same, none where nothing fits."""
    found: list[Recipe] = []
    for recipe in _in_order(scenario):
        if not found and _fits(scenario, recipe):
            found.append(recipe)
        if found and _fits(scenario, replace(recipe, recompute="none")):
            return tuple(dict.fromkeys([*found, recipe]))
    return tuple(found)


def _fits(scenario: Scenario, recipe: Recipe) -> bool:
    """Whether memory may suffice for some cut."""
    allowed = scenario.constraints.recompute
    if recipe.recompute is not None and (scenario.technique.recompute != "none" or (allowed and "none" not in allowed)):
        return True  # to recompute is not the recipe's choice
    try:
        space = build_space(pinned(scenario, recipe))
    except (InfeasibleError, InputError):
        return False
    return Frontier(space.bounds, space.scale).least_value() != NEVER


def _in_order(scenario: Scenario) -> Iterator[Recipe]:
    """Less model parallelism first: tp up to a node, then more stages. Those that use the whole cluster, or, where none
    do, as many replicas as divide the batch."""
    rules, rows = scenario.constraints, mean_rows(scenario)
    shards = [tp for tp in tp_degrees(scenario) if not rules.tp or tp in rules.tp]
    devices = scenario.cluster.device_count
    whole: list[Recipe] = []
    others: list[Recipe] = []
    modules = scenario.model.modules
    layers = sum(one.transformer.layers if one.transformer is not None else len(one.recorded) for one in modules)
    for tp, pp in [(tp, 1) for tp in shards] + [(tp, pp) for pp in range(2, layers + 1) for tp in shards[-1:]]:
        degrees = context_degrees(scenario, tp, rows)
        enough = [cp for cp in degrees if rows <= LONGEST * cp]
        cp = min(enough, default=max(degrees, default=1))
        most, width = devices // (tp * cp * pp), tp * cp
        counts = [dp for dp in divisors(scenario.global_batch) if dp <= most and (not rules.dp or dp in rules.dp)]
        if not counts or (rules.pp and pp not in rules.pp):
            continue
        ep = _experts_over(scenario, width * counts[-1])
        recipe = Recipe(name=RULE, source=SOURCE, tp=tp, pp=pp, cp=cp, ep=ep, dp=counts[-1], sharding=_zero_1(scenario))
        (whole if width * pp * counts[-1] == devices else others).append(recipe)
    yield from whole or others


def _experts_over(scenario: Scenario, ranks: int) -> int:
    """Over how many devices of a node whole experts can lie, at most."""
    node = min(pool.devices_per_node for pool in scenario.cluster.pools)
    allowed = [ep for ep, _ in expert_degrees(scenario, 1) if ranks % ep == 0]
    return max([ep for ep in allowed if ep <= node] or allowed[:1] or [1])


def _zero_1(scenario: Scenario) -> Sharding | None:
    """Where the scenario leaves sharding open, or allows this."""
    allowed = scenario.constraints.sharding
    return None if scenario.technique.sharding != "none" or (allowed and "optimizer" not in allowed) else "optimizer"
