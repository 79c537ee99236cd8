"""Memory of every rank over a step in array code: what is held between forward and backward, for one or many draws.

A rank computes in one order, so its peak depends on that order and on the bytes alone, not on when things happen.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmplan.planner.columns import F, Integers, ProgramColumns, W

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryEvents:
    """Changes of memory in the order of each rank's program, rank by rank.

    action: at whose start (sign 1) or end (sign -1) it happens. row: listed rank. replica, stage, microbatch: whose
    activations.
    """

    action: Integers
    sign: Integers
    row: Integers
    replica: Integers
    stage: Integers
    microbatch: Integers


def memory_events(columns: ProgramColumns) -> MemoryEvents:
    """A microbatch of a stage is held from the start of its forward to the end of its last compute."""
    (computes,) = np.nonzero(columns.kind <= W)
    row = columns.row
    replica = columns.replicas[row]
    stages = int(columns.stage.max(initial=0)) + 1
    cell = (replica[computes] * stages + columns.stage[computes]) * columns.microbatches + columns.microbatch[computes]
    last = np.full(int(cell.max(initial=0)) + 1, -1, dtype=np.int64)
    last[cell] = computes  # the latest one wins
    begins = computes[columns.kind[computes] == F]
    ends = last[last >= 0]
    action = np.concatenate([begins, ends])
    sign = np.repeat([1, -1], [len(begins), len(ends)])
    order = np.lexsort((-sign, action))
    action, sign = action[order], sign[order]
    return MemoryEvents(
        action=action,
        sign=sign,
        row=row[action],
        replica=replica[action],
        stage=columns.stage[action],
        microbatch=columns.microbatch[action],
    )


def held_bytes(events: MemoryEvents, kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes held from each event on, per rank from 0.

    Args:
        kept: `[replica, stage, microbatch]`, or with a last axis of draws.
    """
    changes = kept[events.replica, events.stage, events.microbatch]
    signs = events.sign.reshape(-1, *(1,) * (changes.ndim - 1))
    running = np.cumsum(changes * signs, axis=0)
    begins = np.flatnonzero(np.concatenate([[True], events.row[1:] != events.row[:-1]]))
    before = np.concatenate([np.zeros_like(running[:1]), running])[begins]
    result: NDArray[np.int64] = running - before[np.searchsorted(begins, np.arange(len(running)), side="right") - 1]
    return result


def peak_bytes(events: MemoryEvents, kept: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """`[ranks]` (and draws): the most that each listed rank holds."""
    held = held_bytes(events, kept)
    peaks = np.zeros((ranks, *held.shape[1:]), dtype=np.int64)
    np.maximum.at(peaks, events.row, held)
    return peaks


def memory_over_time(
    events: MemoryEvents, kept: NDArray[np.int64], start_s: Floats, end_s: Floats
) -> tuple[Floats, NDArray[np.int64]]:
    """Time of every event and the bytes held from then on, for one draw."""
    times_s = np.where(events.sign > 0, start_s[events.action], end_s[events.action])
    return times_s, held_bytes(events, kept)
