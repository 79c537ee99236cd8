"""A lower bound on the step time of every configuration at once, before any cut is made.

    (m - 1) * busiest stage + heaviest path + transfers + least finish

where the busiest stage has at least the mean work, the heaviest group, k equal groups, and what `capacity` proves under
memory; NEVER where nothing fits. Each term relaxes the stage-cut problem of `build_problem` and uses the same integers,
so that bound <= inner optimum holds exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmplan.planner.capacity import Rows, busiest_floors
from mmplan.planner.configuration import Configuration, replicas_per_node
from mmplan.planner.contract import GroupGraph
from mmplan.planner.cut_problem import CutProblem
from mmplan.planner.floors import bottleneck_floors, finish_floors, heaviest_paths, memory_may_fit, transfer_floors
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import build_problem, devices_per_node
from mmplan.planner.upsets import IntArray

NEVER = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Per configuration: the step takes at least `step_ns`, NEVER where no cut fits into memory.

    With any memory it takes at least `roomy_ns`. The busiest stage works at least `busiest_ns` per microbatch.
    """

    step_ns: IntArray
    roomy_ns: IntArray
    busiest_ns: IntArray


def lower_bounds(prices: Prices, groups: GroupGraph, configurations: Sequence[Configuration]) -> Bounds:
    """Bounds of all configurations, which share one schedule."""
    node = devices_per_node(prices.scenario.cluster)
    by_size: dict[tuple[int, int], list[int]] = {}
    by_finish: dict[tuple[int, int, int], list[int]] = {}
    for index, one in enumerate(configurations):
        by_size.setdefault((one.tp, one.microbatch_size), []).append(index)
        by_finish.setdefault((one.tp, one.dp, replicas_per_node(one, node)), []).append(index)
    stages = np.array([one.pp for one in configurations], dtype=np.int64)
    microbatches = np.array([one.microbatches for one in configurations], dtype=np.int64)
    busiest_ns, once_ns, which = (np.zeros(len(configurations), dtype=np.int64) for _ in range(3))
    fits = np.ones(len(configurations), dtype=np.bool_)
    problems: list[CutProblem] = []
    for rows in by_size.values():
        problem = build_problem(prices, groups, configurations[rows[0]])
        busiest_ns[rows] = bottleneck_floors(problem, stages[rows])
        once_ns[rows] += int(heaviest_paths(problem).max()) + transfer_floors(problem, stages[rows])
        fits[rows] = memory_may_fit(problem, stages[rows], microbatches[rows])
        which[rows] = len(problems)
        problems.append(problem)
    for rows in by_finish.values():
        once_ns[rows] += finish_floors(build_problem(prices, groups, configurations[rows[0]]), stages[rows])
    roomy_ns = (microbatches - 1) * busiest_ns + once_ns
    open_rows = np.flatnonzero(fits)
    left = Rows(problem=which[open_rows], stages=stages[open_rows], microbatches=microbatches[open_rows])
    busiest_ns[open_rows], fits[open_rows] = busiest_floors(problems, left, busiest_ns[open_rows])
    step_ns = np.where(fits, (microbatches - 1) * busiest_ns + once_ns, NEVER)
    return Bounds(step_ns=step_ns, roomy_ns=roomy_ns, busiest_ns=busiest_ns)
