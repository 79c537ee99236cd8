"""After the search without them: frozen encoders a step ahead, where constraints allow it and simulation prefers it.

A frozen encoder without a backward depends on nothing that a step changes, so its stages can run the next step's batch,
and no stage waits for them. All degrees are searched for the shortest closed form with the encoders on stages of their
own (`ahead_search.py`), and the bound beside a plan is the least of both searches.
"""

from collections.abc import Iterable
from dataclasses import replace

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.graph import ComputationGraph
from mmplan.errors import InputError
from mmplan.planner.ahead_search import cuts_ahead, search_ahead
from mmplan.planner.configuration import Configuration
from mmplan.planner.first_bounds import NEVER
from mmplan.planner.mesh_problem import meshed_groups
from mmplan.planner.plan import Plan, Status
from mmplan.planner.quantise import ROUNDING_GAP, floor_ns, raised_ns
from mmplan.planner.simulate import simulate
from mmplan.planner.space import Space
from mmplan.planner.stopping import Deadline
from mmplan.scenario.scenario import Scenario


def modules_ahead(scenario: Scenario, graph: ComputationGraph) -> tuple[str, ...]:
    """Modules that may run a step ahead: wanted, without a backward, behind none that is not among them.

    Raises:
        InputError: constraints name one that reads what is trained, or the plans that they allow have no such steps.
    """
    wanted = scenario.constraints.prefetch
    if wanted == ():
        return ()
    schedules = set(scenario.constraints.schedule)
    if schedules and not schedules & {"1f1b", "gpipe"}:
        message = (
            f"steps ahead are made under 1f1b or gpipe, and constraints.schedule allows {', '.join(sorted(schedules))}"
        )
        raise InputError(message, key="constraints.prefetch")
    if scenario.constraints.modules:
        message = "constraints.modules gives modules ranks of their own, and steps ahead are made with one mesh for all"
        raise InputError(f"{message}: take one of the two out", key="constraints.prefetch")
    returns = {layer.module for layer in graph.layers() if layer.has_backward}
    known = {layer.module for layer in graph.layers()} - returns
    feeds = {(edge.producer.rpartition(".")[0], edge.consumer.rpartition(".")[0]) for edge in graph.edges()}
    for name in wanted or ():
        if name not in known:
            message = f"'{name}' reads or holds what is trained, so that a step changes what the next one computes"
            raise InputError(message, key=f"constraints.prefetch.{name}")
    named = set(known if wanted is None else wanted) - {
        m.name for m in scenario.model.modules if m.kind == "language_model"
    }
    while late := {reader for producer, reader in feeds if reader in named and producer not in named}:
        named -= late
    return tuple(module.name for module in scenario.model.modules if module.name in named)


def fetched_ahead(
    plan: Plan,
    space: Space,
    *,
    tried: Iterable[Configuration],
    by_step: bool,
    floor_s: float,
    gap: float,
    deadline: Deadline,
) -> Plan:
    """The plan, or one with encoders a step ahead where that is faster in simulation; certified against both.

    Args:
        tried: configurations of which simulation sees every cut: the closed form has a stage wait for the busiest one
            even where that is an encoder's, for which none does.
        by_step: whether all degrees are searched, for the shortest closed form.
        floor_s: no plan takes less, whatever its schedule and a step ahead or not.

    Raises:
        InputError: constraints name encoders that no cut separates from the rest.
    """
    prices, costs = space.prices, AnalyticCostModel(space.prices.scenario)
    names = modules_ahead(prices.scenario, prices.graph)
    meshed = meshed_groups(space.groups, [names]) if names else None
    if meshed is None:
        if prices.scenario.constraints.prefetch:
            message = f"no cut has {' and '.join(names)} on stages of their own, which a step ahead needs"
            raise InputError(
                f"{message}: leave it out, or take no_split zones at their borders away", key="constraints.prefetch"
            )
        return plan
    made = [cut for one in tried for cut in cuts_ahead(space, names, meshed, one, deadline)]
    bound_s = floor_s
    if by_step:
        cutoff_ns = raised_ns(floor_ns(plan.certificate.objective_s), gap)
        found = search_ahead(space, names, meshed, cutoff_ns=cutoff_ns, gap=gap, deadline=deadline)
        made, bound_s = [*made, *found.plans], found.bound_s
    best = min((plan, *made), key=lambda one: simulate(one, prices.graph, costs).step_time_s)
    return _certified(best, min(plan.certificate.bound_s, bound_s), gap)


def best_ahead(space: Space, *, gap: float, deadline: Deadline) -> Plan | None:
    """With encoders a step ahead the fastest in simulation: of plans whose closed form is least, up to the gap, and of
    all cuts of the last one's degrees; None where there is none.

    Raises:
        InputError: as `modules_ahead`.
    """
    names = modules_ahead(space.prices.scenario, space.prices.graph)
    meshed = meshed_groups(space.groups, [names]) if names else None
    if meshed is None:
        return None
    found = search_ahead(space, names, meshed, cutoff_ns=NEVER, gap=gap, deadline=deadline)
    if not found.plans:
        return None
    costs = AnalyticCostModel(space.prices.scenario)
    cuts = (*found.plans, *cuts_ahead(space, names, meshed, found.configurations[-1], deadline))
    best = min(cuts, key=lambda one: simulate(one, space.prices.graph, costs).step_time_s)
    return _certified(best, found.bound_s, gap)


def _certified(plan: Plan, bound_s: float, gap: float) -> Plan:
    proof = plan.certificate
    bound_s = min(bound_s, proof.objective_s)
    left = (proof.objective_s - bound_s) / proof.objective_s if proof.objective_s > 0 else 0.0
    status: Status = (
        proof.status if bound_s == proof.bound_s else "optimal" if left <= gap + ROUNDING_GAP else "feasible"
    )
    return replace(plan, certificate=replace(proof, bound_s=bound_s, gap=left, status=status))
