"""One global order of all computes of a replica: their ends when transfers take no time.

All ranks advance in lock step: in each round every rank whose next compute has its inputs does it. A compute's round is
its level: everything it needs on its rank has a lower one, on other ranks one that is lower by two at least.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmplan.errors import CheckError
from mmplan.planner.columns import KINDS, B, F, I, Integers
from mmplan.planner.schedule import Compute, Schedule

Floats = NDArray[np.float64]

_SHORT_KEYS = 1 << 16  # numpy sorts 16-bit integers by radix, in linear time


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScheduleColumns:
    """A schedule as columns: `[computes]` each, rank by rank in order; `first` is `[ranks + 1]`."""

    first: Integers
    stage: Integers
    kind: Integers
    microbatch: Integers
    stages: int
    microbatches: int

    def rank_of_stage(self) -> Integers:
        """The pipeline rank that runs each stage; -1 for a stage without computes."""
        owner = np.full(self.stages, -1, dtype=np.int64)
        owner[self.stage] = np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))
        return owner


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GlobalOrder:
    """order: computes (indices into the schedule's columns) in one global order that respects every need.
    level, end_s: of each compute, in the order of the columns."""

    order: Integers
    level: Integers
    end_s: Floats


def schedule_columns(schedule: Schedule, stages: int, microbatches: int) -> ScheduleColumns:
    """The columns of a schedule."""
    computes = [compute for order in schedule for compute in order]
    kinds = {kind: index for index, kind in enumerate(KINDS)}
    return ScheduleColumns(
        first=np.cumsum([0, *map(len, schedule)]).astype(np.int64),
        stage=np.array([compute.stage for compute in computes], dtype=np.int64),
        kind=np.array([kinds[compute.kind] for compute in computes], dtype=np.int64),
        microbatch=np.array([compute.microbatch for compute in computes], dtype=np.int64),
        stages=stages,
        microbatches=microbatches,
    )


def place_of(schedule: ScheduleColumns) -> Integers:
    """`[2, stages, microbatches]`: index of each forward, and of each backward or input gradient; -1 where none is."""
    place = np.full((2, schedule.stages, schedule.microbatches), -1, dtype=np.int64)
    (found,) = np.nonzero(schedule.kind <= I)
    half = np.array([0, 1, 1])[schedule.kind[found]]
    place[half, schedule.stage[found], schedule.microbatch[found]] = found
    return place


def dry_run(
    schedule: ScheduleColumns,
    forward_needs: Sequence[Sequence[int]],
    backward_needs: Sequence[Sequence[int]],
    seconds: Sequence[Sequence[float]],
) -> GlobalOrder:
    """The global order of a schedule.

    Args:
        forward_needs: per stage, the stages whose forward of the same microbatch its forward reads.
        backward_needs: per stage, the stages whose backward its backward reads.
        seconds: `[stage][F, B, I, W]`.

    Raises:
        CheckError: ranks wait for each other for ever.
    """
    count, ranks = len(schedule.kind), len(schedule.first) - 1
    needs = _needs(schedule, forward_needs, backward_needs)
    duration_s = np.append(np.asarray(seconds, dtype=np.float64)[schedule.stage, schedule.kind], 0.0)
    # Two entries behind the last compute: one that never ends, where a finished rank stands, and one that always has.
    end_s = np.full(count + 2, np.inf)
    end_s[count + 1] = 0.0
    level = np.zeros(count + 1, dtype=np.int64)
    front, stop = schedule.first[:-1].copy(), schedule.first[1:]
    front[front == stop] = count
    clock_s, before, before_s = np.zeros(ranks), front, np.full(ranks, np.inf)
    idle = 0
    for step in range(2 * count + 2):
        found_s = clock_s
        for need in needs:
            found_s = np.maximum(found_s, end_s.take(need.take(front)))
        found_s = found_s + duration_s.take(front)
        end_s[before] = before_s  # a round late, which leaves room for the transfer; infinite until it is ready
        before, before_s = front, found_s
        level[front] = step
        ready = found_s < np.inf
        np.copyto(clock_s, found_s, where=ready)
        moved = front + ready
        front = np.where(moved == stop, count, moved)
        idle = 0 if ready.any() else idle + 1
        if idle == 2:
            break
    if (front != count).any():
        raise CheckError(f"the schedule never reaches {', '.join(_named(schedule, front[front != count]))}")
    level, end_s = level[:count], end_s[:count]
    by_level = np.argsort(level.astype(np.uint16) if step < _SHORT_KEYS else level, kind="stable")
    return GlobalOrder(order=by_level[np.argsort(end_s[by_level], kind="stable")], level=level, end_s=end_s)


def _needs(
    schedule: ScheduleColumns, forward_needs: Sequence[Sequence[int]], backward_needs: Sequence[Sequence[int]]
) -> list[Integers]:
    """Columns of needed computes: those that need fewer point to the entry that has always ended. The entry of a
    finished rank needs itself, so that it never ends."""
    count = len(schedule.kind)
    place = place_of(schedule)
    place[place == -1] = count  # a need that nobody computes never ends
    columns: list[Integers] = []
    for half, needs_of in enumerate((forward_needs, backward_needs)):
        reads = schedule.kind == F if half == 0 else (schedule.kind == B) | (schedule.kind == I)
        for index in range(max(map(len, needs_of), default=0)):
            if index == len(columns):
                columns.append(np.full(count + 1, count + 1))
                columns[index][count] = count
            sources = np.array([stages[index] if index < len(stages) else -1 for stages in needs_of])
            (found,) = np.nonzero(reads & (sources >= 0)[schedule.stage])
            columns[index][found] = place[half, sources[schedule.stage[found]], schedule.microbatch[found]]
    if not columns:
        columns = [np.append(np.full(count, count + 1), count)]
    return columns


def _named(schedule: ScheduleColumns, computes: Integers) -> list[str]:
    return [
        str(Compute(int(schedule.stage[i]), KINDS[int(schedule.kind[i])], int(schedule.microbatch[i])))  # type: ignore[arg-type]
        for i in computes
    ]
