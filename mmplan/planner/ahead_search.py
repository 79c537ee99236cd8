"""Best-first over all degrees and all numbers of stages for frozen encoders that run a step ahead.

A configuration is first bounded by the mean of the work that some rank has under any schedule; then, for each number k
of stages for the encoders (of p, with m microbatches), by

    (m - 1) max(their work / k, the others' work / (p - k), heaviest group) + longest path of either side + mean finish

and what is still below the best plan is cut exactly, by the dynamic program of 007: a stage holds groups of one side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import plan_from_cut, step_bytes
from mmplan.planner.cut_problem import CutProblem
from mmplan.planner.features import features_bytes
from mmplan.planner.first_bounds import NEVER
from mmplan.planner.mesh_problem import MeshedGroups
from mmplan.planner.plan import Plan
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import build_problem
from mmplan.planner.quantise import floor_ns, lowered_ns, seconds
from mmplan.planner.space import Space, stage_layers
from mmplan.planner.stage_solver import solve_cut
from mmplan.planner.stopping import Deadline

TOLERANCE = 0.001  # of a cut over the least closed form of its degrees
MOST_BOUNDED = 1_000  # configurations bounded by number of stages, and cuts solved: some milliseconds each
MOST_CUT = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class PlansAhead:
    """Plans with steps ahead, each with a shorter closed form than the one before, and their configurations; none has
    one below `bound_s`."""

    plans: tuple[Plan, ...]
    configurations: tuple[Configuration, ...]
    bound_s: float


def search_ahead(
    space: Space,
    names: tuple[str, ...],
    meshed: MeshedGroups,
    *,
    cutoff_ns: int,
    gap: float,
    deadline: Deadline,
) -> PlansAhead:
    """The best plans with these modules a step ahead whose closed form is below the cutoff, up to the gap."""
    rows = _possible(space)
    heap: list[tuple[int, int, int]] = []  # bound, configuration, stages of the encoders
    problems: dict[int, CutProblem] = {}
    plans: list[Plan] = []
    configurations: list[Configuration] = []
    position, cut, open_ns, best_ns = 0, 0, NEVER, cutoff_ns
    while not deadline.passed():
        blunt_ns = int(space.first.any_order_ns[rows[position]]) if position < len(rows) else NEVER
        sharp_ns = heap[0][0] if heap else NEVER
        target_ns = lowered_ns(best_ns, gap) if plans else best_ns
        if min(blunt_ns, sharp_ns) >= target_ns:
            break
        if blunt_ns <= sharp_ns:
            if position == MOST_BOUNDED:
                break
            index = rows[position]
            position += 1
            configuration = replace(space.configurations[index], prefetch=names)
            problems[index] = build_problem(space.prices, meshed.groups, configuration)
            for count, bound_ns in _bounds(problems[index], meshed):
                heappush(heap, (max(blunt_ns, bound_ns), index, count))
            continue
        if cut == MOST_CUT:
            break
        cut += 1
        bound_ns, index, count = heappop(heap)
        configuration = replace(space.configurations[index], prefetch=names)
        problem = ahead_problem(space.prices, meshed, configuration, problems[index], count)
        found = solve_cut(
            problem, meshed.upsets, cutoff_ns=min(target_ns, NEVER - 1), tolerance=TOLERANCE, stop=deadline.passed
        )
        open_ns = min(open_ns, bound_ns if found.exhausted else max(bound_ns, found.bound_ns))
        if found.stage_of is None:
            continue
        made = _made(space, meshed, configuration, found.stage_of, deadline)
        if made is not None:
            plans.append(made)
            configurations.append(space.configurations[index])
            best_ns = min(best_ns, floor_ns(made.certificate.objective_s))
    blunt_ns = int(space.first.any_order_ns[rows[position]]) if position < len(rows) else NEVER
    least_ns = min(open_ns, blunt_ns, heap[0][0] if heap else NEVER)
    return PlansAhead(plans=tuple(plans), configurations=tuple(configurations), bound_s=seconds(least_ns))


def cuts_ahead(
    space: Space, names: tuple[str, ...], meshed: MeshedGroups, configuration: Configuration, deadline: Deadline
) -> Iterator[Plan]:
    """Of one configuration the best cut with each number of stages for the encoders."""
    if not _one_by_one(configuration):
        return
    configuration = replace(configuration, prefetch=names)
    problem = build_problem(space.prices, meshed.groups, configuration)
    for count in range(1, configuration.pp):
        if deadline.passed():
            return
        cut = ahead_problem(space.prices, meshed, configuration, problem, count)
        found = solve_cut(cut, meshed.upsets, tolerance=TOLERANCE, stop=deadline.passed)
        if found.stage_of is not None:
            made = _made(space, meshed, configuration, found.stage_of, deadline)
            yield from () if made is None else (made,)


def _made(
    space: Space, meshed: MeshedGroups, configuration: Configuration, stage_of: Sequence[int], deadline: Deadline
) -> Plan | None:
    """The plan of a cut, where it fits into memory."""
    stages = stage_layers(meshed.groups, stage_of, configuration.pp)
    made = plan_from_cut(space.prices, configuration, stages, bound_s=0.0, status="feasible", wall_s=deadline.spent_s)
    fits = all(stage.memory_bytes <= stage.capacity_bytes for stage in made.stages)
    return made if fits else None


def _one_by_one(configuration: Configuration) -> bool:
    """One stage per rank, all of one mesh, each microbatch alone."""
    alone = configuration.vp == 1 and configuration.batch_factor == 1 and not configuration.meshes
    return alone and configuration.pp > 1 and configuration.schedule in ("1f1b", "gpipe")


def _possible(space: Space) -> list[int]:
    """Configurations with one stage per rank and each microbatch alone, the least bound under any schedule first."""
    every = space.configurations
    alone = np.array([base.batch_factor == 1 for base in every.bases])[every.base]
    may = (every.vp == 1) & (every.pp > 1) & alone & (space.first.any_order_ns < NEVER)
    rows = np.flatnonzero(may)
    order: list[int] = rows[np.argsort(space.first.any_order_ns[rows], kind="stable")].tolist()
    return order


def _bounds(problem: CutProblem, meshed: MeshedGroups) -> Iterator[tuple[int, int]]:
    """Numbers of stages for the encoders, and what no closed form with so many is below."""
    work_ns, mesh_of = problem.work_ns, meshed.mesh_of
    totals = [sum(work for work, mesh in zip(work_ns, mesh_of, strict=True) if mesh == side) for side in (0, 1)]
    heaviest_ns, path_ns = max(work_ns), _longest_path(work_ns, meshed)
    finish_ns = sum(problem.finish_ns) // problem.stages
    groups = [len(kept) for _, kept in meshed.parts]
    for count in range(1, problem.stages):
        stages = (count, problem.stages - count)
        if any(own < wanted for own, wanted in zip(groups, stages, strict=True)):
            continue
        busiest_ns = max(heaviest_ns, *(-(-total // of) for total, of in zip(totals, stages, strict=True)))
        yield count, (problem.microbatches - 1) * busiest_ns + path_ns + finish_ns


def _longest_path(work_ns: Sequence[int], meshed: MeshedGroups) -> int:
    """Through groups of one side."""
    down_ns = list(work_ns)
    for producer, consumer in sorted(meshed.groups.pairs, reverse=True):
        if meshed.mesh_of[producer] == meshed.mesh_of[consumer]:
            down_ns[producer] = max(down_ns[producer], work_ns[producer] + down_ns[consumer])
    return max(down_ns)


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
