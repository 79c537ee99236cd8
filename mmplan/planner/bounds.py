"""A lower bound on the step time of every configuration at once, before any cut is made.

    (m - 1) * max(mean stage work, heaviest group, k equal groups in one stage) + heaviest path + least finish

and NEVER where states and one microbatch of activations do not fit into all stages together. Each term relaxes the
stage-cut problem of `build_problem` and uses the same integers, so that bound <= inner optimum holds exactly.
"""

from collections.abc import Sequence

import numpy as np

from mmplan.planner.configuration import Configuration, replicas_per_node
from mmplan.planner.contract import GroupGraph
from mmplan.planner.floors import bottleneck_floors, finish_floors, heaviest_paths, memory_may_fit
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import build_problem, devices_per_node
from mmplan.planner.upsets import IntArray

NEVER = 2**62


def lower_bounds_ns(prices: Prices, groups: GroupGraph, configurations: Sequence[Configuration]) -> IntArray:
    """One bound per configuration, NEVER where no cut can fit into memory."""
    node = devices_per_node(prices.scenario.cluster)
    by_size: dict[tuple[int, int], list[int]] = {}
    by_finish: dict[tuple[int, int, int], list[int]] = {}
    for index, one in enumerate(configurations):
        by_size.setdefault((one.tp, one.microbatch_size), []).append(index)
        by_finish.setdefault((one.tp, one.dp, replicas_per_node(one, node)), []).append(index)
    stages = np.array([one.pp for one in configurations], dtype=np.int64)
    microbatches = np.array([one.microbatches for one in configurations], dtype=np.int64)
    bounds = np.zeros(len(configurations), dtype=np.int64)
    fits = np.ones(len(configurations), dtype=np.bool_)
    for rows in by_size.values():
        problem = build_problem(prices, groups, configurations[rows[0]])
        bounds[rows] += (microbatches[rows] - 1) * bottleneck_floors(problem, stages[rows])
        bounds[rows] += int(heaviest_paths(problem).max())
        fits[rows] = memory_may_fit(problem, stages[rows], microbatches[rows])
    for rows in by_finish.values():
        bounds[rows] += finish_floors(build_problem(prices, groups, configurations[rows[0]]), stages[rows])
    return np.where(fits, bounds, NEVER)
