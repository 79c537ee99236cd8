"""The least time in which any cut can keep its busiest stage busy under memory, for all configurations at once.

Decision for a trial time T: the stage that is j-th from the end holds min(m, j) microbatches, so it takes only so many
layers within T and within memory, at the level of recomputation that lets it take the most. Bisecting T gives a floor
for the busiest stage, and tells where nothing fits at all.

The *tail* are the last groups, each of which follows everything before it: stages that hold a part of it stand in a
row, and filling them from the end, each to the brim, is best. The stages before them hold the *head*: at most `width`
of them stand side by side at one depth, and work is taken to be divisible there. A chain is all tail.

Several chunks per rank are asked twice: as pieces of a chain in the order of the groups, and as ranks with any groups,
each at a depth of its own, which is a head alone: see `held_by_chunks` for what these hold at least.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
FIRST_STRIDE = 64  # of it in T: most floors are near what was known before, so steps up begin small
Shape = Literal["graph", "chain", "scattered"]
# Work sums of all problems stand in one array of doubles, with errors of 1e-15 times the number of problems.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tables:
    """Of several problems over one graph; `depths` are the numbers of microbatches in flight that occur.

    [problem, tail + 1] `work_ns`: of the last i groups of the tail, at least. [problem, depth] `most_ns`: no stage
    holds more work. `ways`: one per level of recomputation.
    """

    schedule: ScheduleName
    work_ns: IntArray
    total_ns: IntArray
    highest_ns: IntArray
    depths: IntArray
    most_ns: IntArray
    ways: tuple["_Way", ...]
    width: int
    headless: bool
    scattered: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """One level of recomputation: `work_ns` as in `_Tables`; [problem, depth, tail + 1] `reach`: last tail group of a
    stage that memory ends, when i groups lie behind it. All `work_ns`, problem c shifted by c * `shift`, stand in
    `ascending`."""

    work_ns: IntArray
    reach: IntArray
    ascending: npt.NDArray[np.float64]
    shift: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """One entry per configuration: index of its problem, number of stages and of microbatches."""

    problem: IntArray
    stages: IntArray
    microbatches: IntArray

    def take(self, rows: IntArray) -> "Rows":
        return Rows(problem=self.problem[rows], stages=self.stages[rows], microbatches=self.microbatches[rows])


def busiest_floors(
    problems: Sequence[CutProblem], rows: Rows, least_ns: IntArray, shape: Shape = "graph"
) -> tuple[IntArray, BoolArray]:
    """[rows] a floor for the busiest stage, and whether anything may fit into memory.

    Args:
        problems: over one graph and with one schedule.
        least_ns: [rows] a floor known before.
        shape: `chain`: stages follow the order of the groups; `scattered`: they hold any groups.
    """
    floors_ns = least_ns.copy()
    if not len(least_ns):
        return floors_ns, np.ones(0, dtype=np.bool_)
    tables = _tables(problems, rows, shape)
    high_ns = np.maximum(least_ns, tables.highest_ns[rows.problem])
    may = _suffices(tables, rows, high_ns)
    open_rows = np.flatnonzero(may)
    open_rows = open_rows[~_suffices(tables, rows.take(open_rows), least_ns[open_rows])]
    floors_ns[open_rows] += 1  # from here on: T = floor - 1 does not suffice, T = high does
    stride_ns = floors_ns // FIRST_STRIDE + 1
    while len(open_rows):
        floor_ns, stride = floors_ns[open_rows], stride_ns[open_rows]
        trial_ns = np.minimum((floor_ns + high_ns[open_rows]) // 2, floor_ns + stride)
        enough = _suffices(tables, rows.take(open_rows), trial_ns)
        high_ns[open_rows[enough]] = trial_ns[enough]
        floors_ns[open_rows[~enough]] = trial_ns[~enough] + 1
        stride_ns[open_rows[~enough]] = np.minimum(4 * stride[~enough], high_ns[open_rows[~enough]])
        width_ns = high_ns[open_rows] - floors_ns[open_rows]
        open_rows = open_rows[width_ns > PRECISION * floors_ns[open_rows]]
    return floors_ns, may


def some_cut_fits(problems: Sequence[CutProblem], rows: Rows) -> BoolArray:
    """[rows] whether anything may fit into memory, time set aside."""
    if not len(rows.problem):
        return np.ones(0, dtype=np.bool_)
    tables = _tables(problems, rows)
    return _suffices(tables, rows, tables.highest_ns[rows.problem])


def _tables(problems: Sequence[CutProblem], rows: Rows, shape: Shape = "graph") -> _Tables:
    first = problems[0]
    pairs = [(edge.producer, edge.consumer) for edge in first.edges]
    start = {"chain": 0, "scattered": first.groups}.get(shape, tail_start(first.groups, pairs))
    group_ns, state_bytes, kept_bytes = (
        np.array([getattr(problem, name) for problem in problems], dtype=np.int64)
        for name in ("work_ns", "state_bytes", "kept_bytes")
    )
    in_a_row = np.arange(1, int(rows.stages.max()) + 1)
    most = int(rows.microbatches.max())
    depths = in_a_row[in_a_row <= most] if first.schedule == "1f1b" else np.unique(rows.microbatches)
    room_bytes = np.array([one.capacity_bytes - one.least_working_bytes for one in problems], dtype=np.int64)
    ways = tuple(_way(problems, level, start, depths) for level in range(len(first.choices)))
    return _Tables(
        schedule=first.schedule,
        work_ns=_from_the_end(group_ns[:, start:]),
        total_ns=group_ns.sum(axis=1),
        highest_ns=np.array([max(sum(level.work_ns) for level in one.choices) for one in problems], dtype=np.int64),
        depths=depths,
        most_ns=_most_work(group_ns, state_bytes, kept_bytes, depths, room_bytes),
        ways=ways,
        width=1 if shape == "scattered" else chain_cover(start, pairs),
        headless=start == 0,
        scattered=shape == "scattered",
    )


def _way(problems: Sequence[CutProblem], level: int, start: int, depths: IntArray) -> _Way:
    chosen = [problem.choices[level] for problem in problems]
    states = [one.state_bytes or problem.state_bytes for problem, one in zip(problems, chosen, strict=True)]
    state_bytes = _from_the_end(np.array([one[start:] for one in states], dtype=np.int64))
    kept_bytes = _from_the_end(np.array([one.kept_bytes[start:] for one in chosen], dtype=np.int64))
    work_ns = _from_the_end(np.array([one.work_ns[start:] for one in chosen], dtype=np.int64))
    room_bytes = [problem.capacity_bytes - one.working_bytes for problem, one in zip(problems, chosen, strict=True)]
    shift = 3.0 * max(float(sum(one.work_ns)) for problem in problems for one in problem.choices) + 3.0
    return _Way(
        work_ns=work_ns,
        reach=_reach(state_bytes, kept_bytes, depths, room_bytes),
        ascending=(work_ns + shift * np.arange(len(problems))[:, None]).ravel(),
        shift=shift,
    )


def _from_the_end(values: IntArray) -> IntArray:
    """[problems, groups + 1] sums over the last i groups."""
    sums = np.zeros((len(values), values.shape[1] + 1), dtype=np.int64)
    sums[:, 1:] = np.cumsum(values[:, ::-1], axis=1)
    return sums


def _reach(
    state_sums_bytes: IntArray, kept_sums_bytes: IntArray, depths: IntArray, room_bytes: Sequence[int]
) -> IntArray:
    """[problem, depth, i] the most tail groups that are placed when a stage starts behind i of them, by memory."""
    reach = np.zeros((len(state_sums_bytes), len(depths), state_sums_bytes.shape[1]), dtype=np.int64)
    size = reach.shape[2]
    for problem, room in enumerate(room_bytes):
        used = state_sums_bytes[problem] + depths[:, None] * kept_sums_bytes[problem]
        used += (np.arange(len(depths)) * (int(used[-1, -1]) + max(room, 0) + 1))[:, None]  # one ascending row
        ahead = np.searchsorted(used.ravel(), used + room, side="right") - 1
        reach[problem] = np.maximum(ahead - size * np.arange(len(depths))[:, None], 0)
    return reach


def _most_work(
    group_ns: IntArray, state_bytes: IntArray, kept_bytes: IntArray, depths: IntArray, room_bytes: IntArray
) -> IntArray:
    """[problem, depth] the work of the fractional knapsack: groups by work per byte until memory is full."""
    in_flight = depths[None, :, None]
    need_bytes = np.maximum(1, state_bytes[:, None, :] + in_flight * kept_bytes[:, None, :]).astype(np.float64)
    order = np.argsort(-group_ns[:, None, :] / need_bytes, axis=2)
    value_ns = np.take_along_axis(np.broadcast_to(group_ns[:, None, :], need_bytes.shape), order, axis=2)
    need_bytes = np.take_along_axis(need_bytes, order, axis=2)
    before_bytes = np.cumsum(need_bytes, axis=2) - need_bytes
    taken = np.clip((room_bytes[:, None, None] - before_bytes) / need_bytes, 0.0, 1.0)
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
        alive = _alive(tables, rows.microbatches[active], depth[active])
        ahead = behind
        for way in tables.ways:
            limit = (way.work_ns[problem, behind] + trial_ns[active]) * (1 + ROUNDING) + way.shift * problem
            by_time = np.searchsorted(way.ascending, limit, side="right") - 1 - problem * size
            ahead = np.maximum(ahead, np.minimum(by_time, way.reach[problem, alive, behind]))
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


def _alive(tables: _Tables, microbatches: IntArray, depth: IntArray) -> IntArray:
    """Index into `depths` of stages at these depths."""
    found: IntArray = np.searchsorted(tables.depths, in_flight_counts(tables.schedule, microbatches, depth))
    return found


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
        microbatches, level = rows.microbatches[active], depth[active]
        if tables.scattered:  # of p ranks the d-th from the end holds min(p, 2 d - 1) of each chunk when it warmed up
            microbatches, level = np.minimum(microbatches, rows.stages[active]), 2 * level - 1
        most_ns = tables.most_ns[problem, _alive(tables, microbatches, level)]
        count = np.minimum(left[active], beside)
        rest_ns[active] -= count * np.minimum(trial_ns[active], most_ns)
        left[active] -= count
        depth[active] += 1
        beside = tables.width
        active = active[(left[active] > 0) & (rest_ns[active] > 0)]
    fits: BoolArray = rest_ns <= 0
    return fits
