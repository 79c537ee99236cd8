"""A lower bound on the step time of every configuration at once, before any cut is made.

    (m - 1) * busiest stage + heaviest path + transfers + least finish

where the busiest stage has at least the mean work, the heaviest group, k equal groups, and what `capacity` proves under
memory; NEVER where nothing fits. With several chunks per rank (`chunk_cut`)

    (v m + p - 1) * busiest chunk + transfers + least finish

where the busiest chunk has at least what is proved of p v pieces in a row, and a v-th of what is proved of the work of
a rank, which holds at least as many microbatches of each of its layers as under 1F1B. Each term relaxes the stage-cut
problem of `build_problem` and uses the same integers, so that bound <= inner optimum holds exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mmplan.cost_models.layout import Layout
from mmplan.planner.capacity import Rows, busiest_floors, some_cut_fits
from mmplan.planner.chunk_cut import boundary_lags, each_level
from mmplan.planner.configuration import Configuration, replicas_per_node
from mmplan.planner.contract import GroupGraph
from mmplan.planner.cut_problem import CutProblem
from mmplan.planner.first_bounds import NEVER
from mmplan.planner.floors import bottleneck_floors, heaviest_paths, least_finish, memory_may_fit, transfer_floors
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import FinishParts, build_problem, finish_parts, one_node
from mmplan.planner.upsets import BoolArray, IntArray
from mmplan.scenario.schedule_names import ScheduleName

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What bounds of one space were made of, for later ones: problems by layout, microbatch size, kind of links and
    schedule; ends of a step by layout, replicas in a node, and whether one stage holds the model."""

    problems: dict[tuple[Layout, int, bool, ScheduleName], CutProblem] = field(default_factory=dict)
    finishes: dict[tuple[Layout, int, bool], FinishParts] = field(default_factory=dict)


def lower_bounds(
    prices: Prices, groups: GroupGraph, configurations: Sequence[Configuration], known: Known | None = None
) -> SharpBounds:
    """Bounds of all configurations; those with one chunk per rank share one schedule.

    Args:
        known: of the same prices and groups.
    """
    known = Known() if known is None else known
    zeros = np.zeros(len(configurations), dtype=np.int64)
    found = SharpBounds(step_ns=zeros, roomy_ns=zeros.copy(), busiest_ns=zeros.copy())
    chunks = np.array([one.vp for one in configurations], dtype=np.int64)
    for bounds, rows in ((_of_stages, np.flatnonzero(chunks == 1)), (_of_chunks, np.flatnonzero(chunks > 1))):
        if len(rows):
            part = bounds(prices, groups, [configurations[row] for row in rows.tolist()], known)
            for name in ("step_ns", "roomy_ns", "busiest_ns"):
                getattr(found, name)[rows] = getattr(part, name)
    return found


def _of_chunks(
    prices: Prices, groups: GroupGraph, configurations: Sequence[Configuration], known: Known
) -> SharpBounds:
    """Of several chunks per rank; `busiest_ns` is then that of a chunk."""
    sizes = _sizes(prices, groups, configurations, known)
    which, ranks, microbatches = sizes.rows.problem, sizes.rows.stages, sizes.rows.microbatches
    chunks = np.array([one.vp for one in configurations], dtype=np.int64)
    pieces, busiest_ns, once_ns = chunks * ranks, np.zeros_like(ranks), np.zeros_like(ranks)
    for index, problem in enumerate(sizes.problems):
        rows = np.flatnonzero(which == index)
        busiest_ns[rows] = bottleneck_floors(problem, pieces[rows])
        least_first = np.concatenate([[0], np.cumsum(np.sort(boundary_lags(problem)[1 : problem.groups]))])
        once_ns[rows] = least_first[pieces[rows] - 1]
    once_ns += _finish_ns(prices, groups, configurations, ranks, known)
    times = chunks * microbatches + ranks - 1
    roomy_ns = times * busiest_ns + once_ns
    by_level = zip(*map(each_level, sizes.problems), strict=True)
    levels = [_Sizes(problems=tuple(problems), rows=sizes.rows) for problems in by_level]
    at_levels = np.stack([_busiest_chunk(one, chunks, busiest_ns) for one in levels])
    busiest_ns = np.maximum(busiest_ns, at_levels.min(axis=0))
    fits = busiest_ns < NEVER
    step_ns = np.where(fits, times * np.where(fits, busiest_ns, 0) + once_ns, NEVER)
    return SharpBounds(step_ns=step_ns, roomy_ns=roomy_ns, busiest_ns=busiest_ns)


def _busiest_chunk(sizes: "_Sizes", chunks: IntArray, least_ns: IntArray) -> IntArray:
    """[configurations] a floor for the busiest chunk at one level of recomputation, NEVER where nothing fits."""
    pieces, ones = chunks * sizes.rows.stages, np.ones_like(chunks)
    in_a_row = replace(sizes.rows, stages=pieces, microbatches=ones)
    busiest_ns, fits = busiest_floors(sizes.problems, in_a_row, least_ns, shape="chain")
    fits &= _may_fit(sizes)
    rows = np.flatnonzero(fits)
    of_ranks, fits[rows] = busiest_floors(sizes.problems, sizes.rows.take(rows), 0 * rows, shape="scattered")
    busiest_ns[rows] = np.maximum(busiest_ns[rows], -(-of_ranks // chunks[rows]))
    return np.where(fits, busiest_ns, NEVER)


def _of_stages(
    prices: Prices, groups: GroupGraph, configurations: Sequence[Configuration], known: Known
) -> SharpBounds:
    """Of one stage per rank."""
    sizes = _sizes(prices, groups, configurations, known)
    which, stages, microbatches = sizes.rows.problem, sizes.rows.stages, sizes.rows.microbatches
    busiest_ns, once_ns = (np.zeros(len(configurations), dtype=np.int64) for _ in range(2))
    for index, problem in enumerate(sizes.problems):
        rows = np.flatnonzero(which == index)
        busiest_ns[rows] = bottleneck_floors(problem, stages[rows])
        once_ns[rows] += int(heaviest_paths(problem).max()) + transfer_floors(problem, stages[rows])
    once_ns += _finish_ns(prices, groups, configurations, stages, known)
    roomy_ns = (microbatches - 1) * busiest_ns + once_ns
    fits = _may_fit(sizes)
    open_rows = np.flatnonzero(fits)
    found = busiest_floors(sizes.problems, sizes.rows.take(open_rows), busiest_ns[open_rows])
    busiest_ns[open_rows], fits[open_rows] = found
    step_ns = np.where(fits, (microbatches - 1) * busiest_ns + once_ns, NEVER)
    return SharpBounds(step_ns=step_ns, roomy_ns=roomy_ns, busiest_ns=busiest_ns)


def _finish_ns(
    prices: Prices, groups: GroupGraph, configurations: Sequence[Configuration], ranks: IntArray, known: Known
) -> IntArray:
    """[configurations] no rank's end of the step is shorter where so many share the model."""
    finish_ns = np.zeros(len(configurations), dtype=np.int64)
    by_finish: dict[tuple[Layout, int, bool], list[int]] = {}
    for index, one in enumerate(configurations):
        like = (one.layout, replicas_per_node(one, prices.scenario.cluster), one.pp == 1)
        by_finish.setdefault(like, []).append(index)
    for like, members in by_finish.items():
        if like not in known.finishes:
            known.finishes[like] = finish_parts(prices, groups, configurations[members[0]])
        ends = known.finishes[like]
        fixed_ns = ends.fixed_ns if any(ends.trainable) else 0
        finish_ns[members] = least_finish(ends.finish_ns, fixed_ns, ranks[members])
    return finish_ns


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
    return MemoryNeeds(sizes=_sizes(prices, groups, configurations, Known()))


def _sizes(prices: Prices, groups: GroupGraph, configurations: Sequence[Configuration], known: Known) -> _Sizes:
    """Configurations whose links all are of one kind and whose ranks hold and do the same share one problem."""
    cluster = prices.scenario.cluster
    index_of: dict[tuple[Layout, int, bool, ScheduleName], int] = {}
    problems: list[CutProblem] = []
    which = np.zeros(len(configurations), dtype=np.int64)
    for index, one in enumerate(configurations):
        schedule = one.schedule if one.vp == 1 else "1f1b"
        size = (prices.without_alike_replicas(one.layout), one.microbatch_size, one_node(one, cluster), schedule)
        if size not in index_of:
            index_of[size] = len(problems)
            if size not in known.problems:
                known.problems[size] = build_problem(prices, groups, one, anywhere=True)
            problems.append(known.problems[size])
        which[index] = index_of[size]
    return _Sizes(
        problems=tuple(problems),
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
