"""A lower bound on the step time of every configuration at once, before any cut is made.

    (m - 1) * busiest stage + heaviest path + transfers + least finish

where the busiest stage has at least the mean work, the heaviest group, k equal groups, and what `capacity` proves under
memory; NEVER where nothing fits. Each term relaxes the stage-cut problem of `build_problem` and uses the same integers,
so that bound <= inner optimum holds exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmplan.cost_models.layout import Layout
from mmplan.planner.capacity import Rows, busiest_floors, some_cut_fits
from mmplan.planner.configuration import Configuration, replicas_per_node
from mmplan.planner.contract import GroupGraph
from mmplan.planner.cut_problem import CutProblem
from mmplan.planner.first_bounds import NEVER
from mmplan.planner.floors import bottleneck_floors, heaviest_paths, least_finish, memory_may_fit, transfer_floors
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import build_problem, finish_parts
from mmplan.planner.upsets import BoolArray, IntArray

__all__ = ["NEVER", "SharpBounds", "lower_bounds"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SharpBounds:
    """Per configuration: the step takes at least `step_ns`, NEVER where no cut fits into memory.

    With any memory it takes at least `roomy_ns`. The busiest stage works at least `busiest_ns` per microbatch.
    """

    step_ns: IntArray
    roomy_ns: IntArray
    busiest_ns: IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """One problem per layout and microbatch size and the configurations that share it, as rows."""

    problems: tuple[CutProblem, ...]
    rows: Rows


def lower_bounds(prices: Prices, groups: GroupGraph, configurations: Sequence[Configuration]) -> SharpBounds:
    """Bounds of all configurations, which share one schedule."""
    cluster = prices.scenario.cluster
    sizes = _sizes(prices, groups, configurations)
    which, stages, microbatches = sizes.rows.problem, sizes.rows.stages, sizes.rows.microbatches
    by_finish: dict[tuple[Layout, int], list[int]] = {}
    for index, one in enumerate(configurations):
        by_finish.setdefault((one.layout, replicas_per_node(one, cluster)), []).append(index)
    busiest_ns, once_ns = (np.zeros(len(configurations), dtype=np.int64) for _ in range(2))
    for index, problem in enumerate(sizes.problems):
        rows = np.flatnonzero(which == index)
        busiest_ns[rows] = bottleneck_floors(problem, stages[rows])
        once_ns[rows] += int(heaviest_paths(problem).max()) + transfer_floors(problem, stages[rows])
    for members in by_finish.values():
        ends = finish_parts(prices, groups, configurations[members[0]])
        fixed_ns = ends.fixed_ns if any(ends.trainable) else 0
        once_ns[members] += least_finish(ends.finish_ns, fixed_ns, stages[members])
    roomy_ns = (microbatches - 1) * busiest_ns + once_ns
    fits = _may_fit(sizes)
    open_rows = np.flatnonzero(fits)
    found = busiest_floors(sizes.problems, sizes.rows.take(open_rows), busiest_ns[open_rows])
    busiest_ns[open_rows], fits[open_rows] = found
    step_ns = np.where(fits, (microbatches - 1) * busiest_ns + once_ns, NEVER)
    return SharpBounds(step_ns=step_ns, roomy_ns=roomy_ns, busiest_ns=busiest_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeeds:
    """Asks of any capacity which configurations may fit into it."""

    sizes: _Sizes

    def fits(self, capacity_bytes: int) -> BoolArray:
        """[configurations] when a stage may take so much for states and activations."""
        problems = tuple(problem.with_capacity(capacity_bytes) for problem in self.sizes.problems)
        sizes = _Sizes(problems=problems, rows=self.sizes.rows)
        fits = _may_fit(sizes)
        open_rows = np.flatnonzero(fits)
        fits[open_rows] = some_cut_fits(problems, sizes.rows.take(open_rows))
        return fits


def memory_needs(prices: Prices, groups: GroupGraph, configurations: Sequence[Configuration]) -> MemoryNeeds:
    return MemoryNeeds(sizes=_sizes(prices, groups, configurations))


def _sizes(prices: Prices, groups: GroupGraph, configurations: Sequence[Configuration]) -> _Sizes:
    index_of: dict[tuple[Layout, int], int] = {}
    first: list[Configuration] = []
    which = np.zeros(len(configurations), dtype=np.int64)
    for index, one in enumerate(configurations):
        layout = one.layout if one.sharding != "none" else replace(one.layout, dp=1)  # replicas are alike
        size = (layout, one.microbatch_size)
        if size not in index_of:
            index_of[size] = len(first)
            first.append(one)
        which[index] = index_of[size]
    return _Sizes(
        problems=tuple(build_problem(prices, groups, one, anywhere=True) for one in first),
        rows=Rows(
            problem=which,
            stages=np.array([one.pp for one in configurations], dtype=np.int64),
            microbatches=np.array([one.microbatches for one in configurations], dtype=np.int64),
        ),
    )


def _may_fit(sizes: _Sizes) -> BoolArray:
    """[configurations] by an even spread: quick, and leaves few for the sharper test."""
    fits = np.ones(len(sizes.rows.problem), dtype=np.bool_)
    for index, problem in enumerate(sizes.problems):
        rows = np.flatnonzero(sizes.rows.problem == index)
        fits[rows] = memory_may_fit(problem, sizes.rows.stages[rows], sizes.rows.microbatches[rows])
    return fits
