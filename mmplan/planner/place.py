"""Writes the actions of all ranks: every compute in the global order, behind it the transfers of what it has made.

A tensor without bytes is left out at both ends. What passes between two stages of one rank is no transfer.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmplan.planner.columns import RECV, REDUCE, SEND, STEP, B, F, I, Integers, ProgramColumns
from mmplan.planner.dry_run import GlobalOrder, ScheduleColumns, dry_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A tensor of every microbatch from stage to stage; `gradient` is empty where none comes back."""

    source: int
    target: int
    activation: str
    gradient: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pipeline:
    """A schedule and everything about its stages that decides which actions ranks have.

    ranks: `[replica][pipeline rank]` -> rank. seconds: `[stage][F, B, I, W]` of the dry run. reduce_bytes: gradient
    buffer of each stage.
    """

    schedule: ScheduleColumns
    ranks: tuple[tuple[int, ...], ...]
    transfers: tuple[Transfer, ...]
    seconds: tuple[tuple[float, float, float, float], ...]
    reduce_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lowered:
    """A program with what lowering knows of each action.

    level: what an action needs has a lower one, except that the sends of one compute share theirs, in order; levels of
    computes are even, those of sends odd. match: the action itself, or the send of a receive.
    """

    columns: ProgramColumns
    level: Integers
    match: Integers


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Some actions of one replica, in one order; `row` is the pipeline rank, `other` that of the peer."""

    row: Integers
    kind: Integers
    stage: Integers
    microbatch: Integers
    other: Integers
    tensor: Integers
    transfer: Integers
    level: Integers
    pair: Integers  # the same for both ends of a transfer


def place(pipeline: Pipeline, tensor_bytes: NDArray[np.int64]) -> Lowered:
    """The program.

    Args:
        tensor_bytes: `[replica, microbatch, transfer]`; one replica stands for all when there is one.

    Raises:
        CheckError: the schedule makes ranks wait for each other.
    """
    forward: list[list[int]] = [[] for _ in pipeline.seconds]
    backward: list[list[int]] = [[] for _ in pipeline.seconds]
    for transfer in pipeline.transfers:
        forward[transfer.target].append(transfer.source)
        if transfer.gradient:
            backward[transfer.source].append(transfer.target)
    order = dry_run(pipeline.schedule, forward, backward, pipeline.seconds)
    rows = _by_rank(_actions(pipeline, order))
    parts = [_of_replica(pipeline, rows, replica, size) for replica, size in enumerate(tensor_bytes)]
    return _joined(pipeline, parts)


def _names(pipeline: Pipeline) -> tuple[str, ...]:
    """Tensor names: activation and gradient of transfer t at 2 t and 2 t + 1."""
    return tuple(name for transfer in pipeline.transfers for name in (transfer.activation, transfer.gradient))


def _actions(pipeline: Pipeline, order: GlobalOrder) -> _Rows:
    """Computes and both ends of all transfers of a replica in the global order, then reductions and updates."""
    schedule = pipeline.schedule
    owner = schedule.rank_of_stage()
    stage, kind, microbatch = schedule.stage[order.order], schedule.kind[order.order], schedule.microbatch[order.order]
    level = 2 * order.level[order.order]
    makes = np.where(kind == F, 0, np.where((kind == B) | (kind == I), 1, 2))  # an output, its gradient, or nothing
    slots, produced = np.ones(len(stage), dtype=np.int64), []
    for index, transfer in enumerate(pipeline.transfers):
        if owner[transfer.source] == owner[transfer.target]:
            continue
        ends = [(0, transfer.source, transfer.target)]
        ends += [(1, transfer.target, transfer.source)] if transfer.gradient else []
        for half, source, target in ends:
            (makers,) = np.nonzero((stage == source) & (makes == half))
            produced.append((index, half, source, target, makers, slots[makers]))
            slots[makers] += 2
    first = np.cumsum(slots) - slots
    total = int(slots.sum())
    shape = [np.full(total, -1, dtype=np.int64) for _ in range(9)]
    rows = _Rows(*shape)
    for field, value in zip(shape, (owner[stage], kind, stage, microbatch), strict=False):
        field[first] = value
    rows.level[first] = level
    for index, half, source, target, makers, slot in produced:
        at = first[makers] + slot
        for place_, action, end, other in ((at, SEND, source, target), (at + 1, RECV, target, source)):
            rows.row[place_], rows.other[place_] = owner[end], owner[other]
            rows.kind[place_], rows.stage[place_], rows.microbatch[place_] = action, end, microbatch[makers]
            rows.tensor[place_], rows.transfer[place_] = 2 * index + half, index
            rows.level[place_], rows.pair[place_] = level[makers] + 1, at
    return _with_finish(pipeline, rows, owner, int(level.max(initial=0)) + 2)


def _with_finish(pipeline: Pipeline, rows: _Rows, owner: Integers, base: int) -> _Rows:
    """Reductions of the stages of each rank, then one update."""
    finish: list[tuple[int, int, int, int]] = []  # pipeline rank, kind, stage, level
    replicas = len(pipeline.ranks)
    for row in range(len(pipeline.schedule.first) - 1):
        stages = [int(stage) for stage in np.nonzero(owner == row)[0]]
        reduced = [stage for stage in stages if replicas > 1 and pipeline.reduce_bytes[stage] > 0]
        finish += [(row, REDUCE, stage, base + 2 * index) for index, stage in enumerate(reduced)]
        finish.append((row, STEP, stages[0], base + 2 * len(reduced)))
    added = np.array(finish, dtype=np.int64).reshape(-1, 4).T
    none = np.full(added.shape[1], -1, dtype=np.int64)
    parts = (added[0], added[1], added[2], none, none, none, none, added[3], none)
    return _Rows(*(np.concatenate(pair) for pair in zip(_fields(rows), parts, strict=True)))


def _fields(rows: _Rows) -> tuple[Integers, ...]:
    return (
        *(rows.row, rows.kind, rows.stage, rows.microbatch),
        *(rows.other, rows.tensor, rows.transfer, rows.level, rows.pair),
    )


def _by_rank(rows: _Rows) -> _Rows:
    """Rank by rank, each in the global order."""
    short = rows.row.astype(np.uint16) if rows.row.max(initial=0) < 2**16 else rows.row
    return _taken(rows, np.argsort(short, kind="stable"))


def _taken(rows: _Rows, which: NDArray[np.int64] | NDArray[np.bool_]) -> _Rows:
    return _Rows(*(field[which] for field in _fields(rows)))


def _of_replica(
    pipeline: Pipeline, rows: _Rows, replica: int, tensor_bytes: NDArray[np.int64]
) -> tuple[int, _Rows, NDArray[np.int64]]:
    """The replica's actions and their bytes, empty transfers left out."""
    sizes = np.zeros(len(rows.row), dtype=np.int64)
    (transfers,) = np.nonzero(rows.transfer >= 0)
    sizes[transfers] = tensor_bytes[rows.microbatch[transfers], rows.transfer[transfers]]
    (reduces,) = np.nonzero(rows.kind == REDUCE)
    sizes[reduces] = np.array(pipeline.reduce_bytes, dtype=np.int64)[rows.stage[reduces]]
    kept = (rows.transfer < 0) | (sizes > 0)
    return replica, rows if kept.all() else _taken(rows, kept), sizes[kept]


def _joined(pipeline: Pipeline, parts: list[tuple[int, _Rows, NDArray[np.int64]]]) -> Lowered:
    """All replicas, ordered by rank."""
    count = len(pipeline.schedule.first) - 1
    numbers = np.array([pipeline.ranks[replica] for replica, _, _ in parts], dtype=np.int64)  # [listed, pipeline rank]
    bounds = [np.searchsorted(rows.row, np.arange(count + 1)) for _, rows, _ in parts]
    listed = sorted((int(numbers[part, row]), part, row) for part in range(len(parts)) for row in range(count))
    if len(parts) == 1:
        take: NDArray[np.int64] | slice = slice(None)
    else:
        offsets = np.cumsum([0, *(len(rows.row) for _, rows, _ in parts)])
        pieces = [np.arange(bounds[part][row], bounds[part][row + 1]) + offsets[part] for _, part, row in listed]
        take = np.concatenate(pieces)

    def column(name: str) -> Integers:
        return np.concatenate([getattr(rows, name) for _, rows, _ in parts])[take]

    lengths = [int(bounds[part][row + 1] - bounds[part][row]) for _, part, row in listed]
    first = np.cumsum([0, *lengths])
    owner = np.repeat(np.array([part for _, part, _ in listed]), lengths)
    other = column("other")
    leading = pipeline.schedule.rank_of_stage()
    stage_of_row = [int(np.nonzero(leading == row)[0][0]) for row in range(count)]
    columns = ProgramColumns(
        ranks=np.array([rank for rank, _, _ in listed], dtype=np.int64),
        stages=np.array([stage_of_row[row] for _, _, row in listed], dtype=np.int64),
        replicas=np.array([parts[part][0] for _, part, _ in listed], dtype=np.int64),
        first=first,
        kind=column("kind"),
        stage=column("stage"),
        microbatch=column("microbatch"),
        peer=np.where(other >= 0, numbers[owner, other], -1),
        tensor=column("tensor"),
        bytes=np.concatenate([sizes for _, _, sizes in parts])[take],
        tensors=_names(pipeline),
        microbatches=pipeline.schedule.microbatches,
        replica_count=len(parts),
    )
    return Lowered(columns=columns, level=column("level"), match=_matched(columns, owner, column("pair")))


def _matched(columns: ProgramColumns, part: Integers, pair: Integers) -> Integers:
    """Of each action itself, of a receive the send of its pair in the same replica."""
    match = np.arange(columns.size)
    (sends,), (receives,) = np.nonzero(columns.kind == SEND), np.nonzero(columns.kind == RECV)
    send_of = np.empty((int(part.max(initial=0)) + 1, int(pair.max(initial=0)) + 1), dtype=np.int64)
    send_of[part[sends], pair[sends]] = sends
    match[receives] = send_of[part[receives], pair[receives]]
    return match
