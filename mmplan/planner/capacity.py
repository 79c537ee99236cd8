"""The least time in which any cut can keep its busiest stage busy under memory, for all configurations at once.

Decision for a trial time T: the stage that is j-th from the end holds min(m, j) microbatches, so it takes only so many
layers within T and within memory. Bisecting T gives a floor for the busiest stage, and tells where nothing fits at all.

The *tail* are the last groups, each of which follows everything before it: stages that hold a part of it stand in a
row, and filling them from the end, each to the brim, is best. The stages before them hold the *head*: at most `width`
of them stand side by side at one depth, and work is taken to be divisible there. A chain is all tail.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmplan.planner.cut_problem import CutProblem
from mmplan.planner.quantise import above_ns
from mmplan.planner.schedules.in_flight import in_flight_counts
from mmplan.planner.stage_order import chain_cover, tail_start
from mmplan.planner.upsets import BoolArray, IntArray
from mmplan.scenario.schedule_names import ScheduleName

# Where bisection ends, relative to T: a twentieth of the usual gap of 1 %.
PRECISION = 0.0005
# Work sums of all problems stand in one array of doubles, with errors of 1e-15 times the number of problems.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tables:
    """Of several problems over one graph; `levels` are the numbers of microbatches in flight that occur.

    [problem, tail + 1] `work_ns`: of the last i groups of the tail. [problem, level, tail + 1] `reach`: last tail group
    of a stage that memory ends, when i groups lie behind it. [problem, level] `most_ns`: no stage holds more work. All
    `work_ns`, problem c shifted by c * `shift`, stand in `ascending`.
    """

    schedule: ScheduleName
    work_ns: IntArray
    total_ns: IntArray
    levels: IntArray
    reach: IntArray
    most_ns: IntArray
    ascending: npt.NDArray[np.float64]
    shift: float
    width: int
    headless: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """One entry per configuration: index of its problem, number of stages and of microbatches."""

    problem: IntArray
    stages: IntArray
    microbatches: IntArray

    def take(self, rows: IntArray) -> "Rows":
        return Rows(problem=self.problem[rows], stages=self.stages[rows], microbatches=self.microbatches[rows])


def busiest_floors(problems: Sequence[CutProblem], rows: Rows, least_ns: IntArray) -> tuple[IntArray, BoolArray]:
    """[rows] a floor for the busiest stage, and whether anything may fit into memory.

    Args:
        problems: over one graph and with one schedule.
        least_ns: [rows] a floor known before.
    """
    floors_ns = least_ns.copy()
    if not len(least_ns):
        return floors_ns, np.ones(0, dtype=np.bool_)
    tables = _tables(problems, rows)
    high_ns = np.maximum(least_ns, tables.total_ns[rows.problem])
    may = _suffices(tables, rows, high_ns)
    open_rows = np.flatnonzero(may)
    open_rows = open_rows[~_suffices(tables, rows.take(open_rows), least_ns[open_rows])]
    floors_ns[open_rows] += 1  # from here on: T = floor - 1 does not suffice, T = high does
    while len(open_rows):
        trial_ns = (floors_ns[open_rows] + high_ns[open_rows]) // 2
        enough = _suffices(tables, rows.take(open_rows), trial_ns)
        high_ns[open_rows[enough]] = trial_ns[enough]
        floors_ns[open_rows[~enough]] = trial_ns[~enough] + 1
        width_ns = high_ns[open_rows] - floors_ns[open_rows]
        open_rows = open_rows[width_ns > PRECISION * floors_ns[open_rows]]
    return floors_ns, may


def some_cut_fits(problems: Sequence[CutProblem], rows: Rows) -> BoolArray:
    """[rows] whether anything may fit into memory, time set aside."""
    if not len(rows.problem):
        return np.ones(0, dtype=np.bool_)
    tables = _tables(problems, rows)
    return _suffices(tables, rows, tables.total_ns[rows.problem])


def _tables(problems: Sequence[CutProblem], rows: Rows) -> _Tables:
    first = problems[0]
    pairs = [(edge.producer, edge.consumer) for edge in first.edges]
    start = tail_start(first.groups, pairs)
    group_ns, state_bytes, kept_bytes = (
        np.array([getattr(problem, name) for problem in problems], dtype=np.int64)
        for name in ("work_ns", "state_bytes", "kept_bytes")
    )
    depths = np.arange(1, int(rows.stages.max()) + 1)
    most = int(rows.microbatches.max())
    levels = depths[depths <= most] if first.schedule == "1f1b" else np.unique(rows.microbatches)
    capacity_bytes = first.capacity_bytes
    work_ns, state_sums_bytes, kept_sums_bytes = (
        _from_the_end(values[:, start:]) for values in (group_ns, state_bytes, kept_bytes)
    )
    total_ns = group_ns.sum(axis=1)
    shift = 3.0 * float(total_ns.max()) + 3.0
    return _Tables(
        schedule=first.schedule,
        work_ns=work_ns,
        total_ns=total_ns,
        levels=levels,
        reach=_reach(state_sums_bytes, kept_sums_bytes, levels, capacity_bytes),
        most_ns=_most_work(group_ns, state_bytes, kept_bytes, levels, capacity_bytes),
        ascending=(work_ns + shift * np.arange(len(problems))[:, None]).ravel(),
        shift=shift,
        width=chain_cover(start, pairs),
        headless=start == 0,
    )


def _from_the_end(values: IntArray) -> IntArray:
    """[problems, groups + 1] sums over the last i groups."""
    sums = np.zeros((len(values), values.shape[1] + 1), dtype=np.int64)
    sums[:, 1:] = np.cumsum(values[:, ::-1], axis=1)
    return sums


def _reach(state_sums_bytes: IntArray, kept_sums_bytes: IntArray, levels: IntArray, capacity_bytes: int) -> IntArray:
    """[problem, level, i] the most tail groups that are placed when a stage starts behind i of them, by memory."""
    reach = np.zeros((len(state_sums_bytes), len(levels), state_sums_bytes.shape[1]), dtype=np.int64)
    for problem in range(len(state_sums_bytes)):
        for index, level in enumerate(levels):
            used = state_sums_bytes[problem] + level * kept_sums_bytes[problem]
            reach[problem, index] = np.searchsorted(used, used + capacity_bytes, side="right") - 1
    return reach


def _most_work(
    group_ns: IntArray, state_bytes: IntArray, kept_bytes: IntArray, levels: IntArray, capacity_bytes: int
) -> IntArray:
    """[problem, level] the work of the fractional knapsack: groups by work per byte until memory is full."""
    in_flight = levels[None, :, None]
    need_bytes = np.maximum(1, state_bytes[:, None, :] + in_flight * kept_bytes[:, None, :]).astype(np.float64)
    order = np.argsort(-group_ns[:, None, :] / need_bytes, axis=2)
    value_ns = np.take_along_axis(np.broadcast_to(group_ns[:, None, :], need_bytes.shape), order, axis=2)
    need_bytes = np.take_along_axis(need_bytes, order, axis=2)
    before_bytes = np.cumsum(need_bytes, axis=2) - need_bytes
    taken = np.clip((capacity_bytes - before_bytes) / need_bytes, 0.0, 1.0)
    return above_ns((value_ns * taken).sum(axis=2))


def _suffices(tables: _Tables, rows: Rows, trial_ns: IntArray) -> BoolArray:
    """[rows] False where no cut keeps every stage within the trial time and within memory."""
    size = tables.work_ns.shape[1]
    placed = np.zeros(len(trial_ns), dtype=np.int64)
    depth = np.ones(len(trial_ns), dtype=np.int64)  # of the next stage
    left = rows.stages.copy()
    active = np.flatnonzero((left > 0) & (size > 1))
    while len(active):
        problem, behind = rows.problem[active], placed[active]
        level = _level(tables, rows.microbatches[active], depth[active])
        limit = (tables.work_ns[problem, behind] + trial_ns[active]) * (1 + ROUNDING) + tables.shift * problem
        by_time = np.searchsorted(tables.ascending, limit, side="right") - 1 - problem * size
        ahead = np.minimum(by_time, tables.reach[problem, level, behind])
        if tables.headless:
            placed[active] = ahead
        # with a head, the stage that ends the tail is left to it, as it may hold both
        goes_on = (ahead > behind) & (ahead < size - 1)
        stuck = active[ahead == behind]
        left[stuck] = 0
        active, ahead = active[goes_on], ahead[goes_on]
        placed[active] = ahead
        depth[active] += 1
        left[active] -= 1
        active = active[left[active] > 0]
    if tables.headless:
        done: BoolArray = placed == size - 1
        return done
    return _head_fits(tables, rows, trial_ns, placed, depth, left)


def _level(tables: _Tables, microbatches: IntArray, depth: IntArray) -> IntArray:
    """Index into `levels` of stages at these depths."""
    level: IntArray = np.searchsorted(tables.levels, in_flight_counts(tables.schedule, microbatches, depth))
    return level


def _head_fits(
    tables: _Tables, rows: Rows, trial_ns: IntArray, placed: IntArray, depth: IntArray, left: IntArray
) -> BoolArray:
    """[rows] whether the stages left, the first of them at `depth`, can do the work that is left.

    The first may hold a part of the tail and stands alone; the others stand `width` side by side.
    """
    rest_ns = tables.total_ns[rows.problem] - tables.work_ns[rows.problem, placed]
    beside = 1 if tables.work_ns.shape[1] > 1 else tables.width
    left, depth = left.copy(), depth.copy()
    active = np.flatnonzero((left > 0) & (rest_ns > 0))
    while len(active):
        problem = rows.problem[active]
        most_ns = tables.most_ns[problem, _level(tables, rows.microbatches[active], depth[active])]
        count = np.minimum(left[active], beside)
        rest_ns[active] -= count * np.minimum(trial_ns[active], most_ns)
        left[active] -= count
        depth[active] += 1
        beside = tables.width
        active = active[(left[active] > 0) & (rest_ns[active] > 0)]
    fits: BoolArray = rest_ns <= 0
    return fits
