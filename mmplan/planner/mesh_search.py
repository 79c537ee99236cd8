"""The part of the search space in which modules have ranks of their own: its frontiers, and how one of it is solved."""

from collections.abc import Sequence
from dataclasses import replace

from mmplan.planner.bounds import NEVER
from mmplan.planner.configurations import list_configurations
from mmplan.planner.mesh_choices import mesh_choices
from mmplan.planner.mesh_frontier import Meshed, MeshFrontier
from mmplan.planner.mesh_problem import meshed_groups, meshed_problem
from mmplan.planner.problem import room_bytes_of
from mmplan.planner.space import Answer, Space, stage_layers
from mmplan.planner.stage_solver import solve_cut
from mmplan.planner.stopping import Deadline


def mesh_frontiers(space: Space, deadline: Deadline) -> tuple[MeshFrontier, ...]:
    """One for each way to give modules meshes that no-split zones and edges allow.

    Raises:
        InfeasibleError: the constraints leave the other modules nothing.
    """
    scenario, prices = space.prices.scenario, space.prices
    ways = [
        (apart, meshed)
        for apart in mesh_choices(scenario)
        if (meshed := meshed_groups(space.groups, [one.modules for one in apart])) is not None
    ]
    rows = space.configurations
    if ways and scenario.constraints.pp:  # which counts all stages of a plan
        free = replace(scenario, constraints=replace(scenario.constraints, pp=()))
        room_bytes = room_bytes_of(scenario)
        rows = list_configurations(
            free, len(space.groups.groups), lambda layout: prices.most_samples(layout, room_bytes)
        )
    return tuple(MeshFrontier(prices, rows, space.scale, apart, meshed, deadline.passed) for apart, meshed in ways)


def solve_meshed(
    space: Space, frontier: MeshFrontier, found: Meshed, *, cutoff_ns: int | None, deadline: Deadline
) -> Answer:
    """The best cut of a configuration below the cutoff, by the dynamic program."""
    problem = meshed_problem(space.prices, frontier.meshed, found.configuration)
    result = solve_cut(
        problem,
        frontier.meshed.upsets,
        cutoff_ns=cutoff_ns,
        busiest_ns=found.busiest_ns,
        stop=deadline.passed,
    )
    stages = result.stage_of
    unfit = stages is None and not result.exhausted and cutoff_ns is None
    return Answer(
        stages=None if stages is None else stage_layers(space.groups, stages, found.configuration.pp),
        bound_ns=NEVER if unfit else result.bound_ns,
        exhausted=result.exhausted,
        unfit=unfit,
    )


def why_no_meshes(space: Space, frontiers: Sequence[MeshFrontier]) -> str:
    """Why modules cannot have the ranks of their own that constraints ask for, in one sentence."""
    scenario = space.prices.scenario
    for apart in mesh_choices(scenario):
        for one in apart:
            if not one.widths:
                names = " and ".join(one.modules)
                return (
                    f"constraints.modules: no allowed tp divides a node and the heads and widths of {names}, with an "
                    "allowed ep that divides their experts; of tp, cp (a power of two) and ep at most tp and ep are "
                    "above 1"
                )
    pins = ", ".join(pin.module for pin in scenario.constraints.modules or ())
    if not frontiers:
        why = "a no-split zone or an edge joins them to others"
        return f"constraints.modules: {pins} cannot have ranks of their own, {why}"
    rules = scenario.constraints
    if rules.vp and 1 not in rules.vp:
        return f"constraints.vp allows no single chunk per rank, and constraints.modules ({pins}) goes with one alone"
    if rules.pp and max(rules.pp) < 2:
        return (
            f"constraints.pp counts the stages of all meshes, and allows 1: {pins} on ranks of their own and the other "
            "modules have at least one each"
        )
    if not any(frontier.tally.met for frontier in frontiers):
        return (
            f"constraints.modules: no degrees of {pins} fit beside those of the other modules: together they have "
            f"{scenario.cluster.device_count} devices, and each replica needs whole samples of a microbatch"
        )
    return f"no plan of {scenario.name} with {pins} on ranks of their own fits into memory"
