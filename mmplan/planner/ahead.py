"""After the proof: frozen encoders a step ahead, where constraints allow it and simulation prefers it.

A frozen encoder without a backward depends on nothing that a step changes, so its stages can run the next step's batch,
and no stage waits for them. The degrees of the plan and of its runners-up are cut anew for it, with the encoders on
stages of their own; the bound beside it is one of every schedule, for which some rank has the mean of the work.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.graph import ComputationGraph
from mmplan.errors import InputError
from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import plan_from_cut, step_bytes
from mmplan.planner.cut_problem import CutProblem
from mmplan.planner.features import features_bytes
from mmplan.planner.mesh_problem import MeshedGroups, meshed_groups
from mmplan.planner.plan import Plan, Status
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import build_problem
from mmplan.planner.simulate import simulate
from mmplan.planner.space import Space, stage_layers
from mmplan.planner.stage_solver import solve_cut
from mmplan.planner.stopping import Deadline
from mmplan.scenario.scenario import Scenario

TOLERANCE = 0.001  # of a cut over the least closed form of its degrees


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
    plan: Plan, space: Space, configurations: Iterable[Configuration], *, floor_s: float, deadline: Deadline
) -> Plan:
    """The plan, or one of these configurations with encoders a step ahead where that is faster in simulation.

    Args:
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
    best, best_s = plan, simulate(plan, prices.graph, costs).step_time_s
    for configuration in configurations:
        if not _possible(configuration):
            continue
        for made in _cuts(prices, meshed, replace(configuration, prefetch=names), floor_s, deadline):
            step_s = simulate(made, prices.graph, costs).step_time_s
            if step_s < best_s:
                best, best_s = made, step_s
    return best if best is not plan else _bounded(plan, floor_s)


def _possible(configuration: Configuration) -> bool:
    """One stage per rank, all of one mesh, each microbatch alone."""
    alone = configuration.vp == 1 and configuration.batch_factor == 1 and not configuration.meshes
    return alone and configuration.pp > 1 and configuration.schedule in ("1f1b", "gpipe")


def _cuts(
    prices: Prices, meshed: MeshedGroups, configuration: Configuration, floor_s: float, deadline: Deadline
) -> Iterator[Plan]:
    """The best cut with each number of stages for the encoders."""
    problem = build_problem(prices, meshed.groups, configuration)
    for count in range(1, configuration.pp):
        if deadline.passed():
            return
        found = solve_cut(
            ahead_problem(prices, meshed, configuration, problem, count),
            meshed.upsets,
            tolerance=TOLERANCE,
            stop=deadline.passed,
        )
        if found.stage_of is None:
            continue
        stages = stage_layers(meshed.groups, found.stage_of, configuration.pp)
        made = plan_from_cut(prices, configuration, stages, bound_s=floor_s, status="feasible", wall_s=deadline.spent_s)
        if all(stage.memory_bytes <= stage.capacity_bytes for stage in made.stages):
            yield made


def ahead_problem(
    prices: Prices, meshed: MeshedGroups, configuration: Configuration, problem: CutProblem, count: int
) -> CutProblem:
    """The cut with `count` stages a step ahead: no other one waits for them, and features take memory at both ends."""
    mesh_of, groups = meshed.mesh_of, meshed.groups
    place = {layer: index for index, layers in enumerate(groups.groups) for layer in layers}
    cut = ((place[edge.producer], place[edge.consumer], edge) for edge in prices.graph.edges())
    waiting = features_bytes(cut, [mesh == 0 for mesh in mesh_of], lambda edge: step_bytes(prices, configuration, edge))

    def held(state_bytes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(own + more for own, more in zip(state_bytes, waiting, strict=True)) if state_bytes else ()

    kinds = [replace(problem.kind(stage), mesh=0 if stage < count else 1) for stage in range(configuration.pp)]
    distinct = list(dict.fromkeys(kinds))
    return replace(
        problem,
        state_bytes=held(problem.state_bytes),
        levels=tuple(replace(level, state_bytes=held(level.state_bytes)) for level in problem.levels),
        edges=tuple(edge for edge in problem.edges if mesh_of[edge.producer] == mesh_of[edge.consumer]),
        kinds=tuple(distinct),
        kind_of=tuple(map(distinct.index, kinds)),
        mesh_of=mesh_of,
    )


def _bounded(plan: Plan, floor_s: float) -> Plan:
    """A plan that no plan a step ahead was found to beat, certified against these, too."""
    proof = plan.certificate
    bound_s = min(proof.bound_s, floor_s)
    gap = (proof.objective_s - bound_s) / proof.objective_s if proof.objective_s > 0 else 0.0
    status: Status = proof.status if bound_s == proof.bound_s else "feasible"
    return replace(plan, certificate=replace(proof, bound_s=bound_s, gap=gap, status=status))
