"""Writes the actions of all ranks: every compute in the global order, behind it the transfers of what it has made.

A tensor without bytes is left out at both ends. What passes between two stages of one rank is no transfer.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmplan.planner.border import Way
from mmplan.planner.columns import KINDS, RECV, REDUCE, SEND, STEP, TIE, B, F, I, Integers, ProgramColumns
from mmplan.planner.dry_run import GlobalOrder, ScheduleColumns, dry_run
from mmplan.planner.mesh import Mesh
from mmplan.planner.program import is_ahead
from mmplan.planner.shared_bytes import SharedBytes

_SHORT_KEYS = 1 << 16  # numpy sorts 16-bit integers by radix, in linear time


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A tensor of every microbatch from stage to stage; `gradient` is empty where none comes back. `together`: of as
    many microbatches as both ends run at once. way: between unlike meshes, see `border.py`."""

    source: int
    target: int
    activation: str
    gradient: str
    together: bool = False
    way: Way = "copies"


@dataclass(frozen=True, kw_only=True, slots=True)
class TiedSum:
    """A gradient that the ranks of several stages in a replica sum; `bytes`: of a rank's buffer, 0 where one rank has
    all of these stages."""

    stages: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pipeline:
    """A schedule and everything about its stages that decides which actions ranks have.

    ranks: `[replica][pipeline rank]` -> rank. meshes: of each pipeline rank, where these are not all alike; `ranks` is
    then that of replica 0 alone. seconds: `[stage][F, B, I, W]` of the dry run. reduce_bytes: gradient
    buffer of each stage, 0 where no other rank holds the same weights. shared_bytes: what each stage hands to
    collectives; empty: the gradient buffer in REDUCE. ties: sums over stages, in the order of all ranks. alone_bytes:
    the same as shared_bytes of a stage's other layers where some run `batch_factor` microbatches at once.
    """

    schedule: ScheduleColumns
    ranks: tuple[tuple[int, ...], ...]
    transfers: tuple[Transfer, ...]
    seconds: tuple[tuple[float, float, float, float], ...]
    reduce_bytes: tuple[int, ...]
    shared_bytes: tuple[SharedBytes, ...] = ()
    meshes: tuple[Mesh, ...] = ()
    ties: tuple[TiedSum, ...] = ()
    batch_factor: int = 1
    alone_bytes: tuple[SharedBytes, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lowered:
    """A program with what lowering knows of each action.

    level: what an action needs has a lower one, except that the sends of one compute share theirs, in order. match: the
    action itself, or the send of a receive.
    """

    columns: ProgramColumns
    level: Integers
    match: Integers


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Actions of one replica, rank by rank; `row` is the pipeline rank, `other` that of the peer, `match` as in
    `Lowered`."""

    row: Integers
    kind: Integers
    stage: Integers
    microbatch: Integers
    other: Integers
    tensor: Integers
    level: Integers
    match: Integers


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """Transfers in the order in which the computes that make them send them; the last entry stands for none.

    tensor: 2 t for the activation of transfer t, 2 t + 1 for its gradient. first, count: by `3 * stage + half`, with
    half 0 for a forward, 1 for a backward or input gradient, 2 for a weight gradient.
    """

    target: Integers
    tensor: Integers
    first: Integers
    count: Integers


def place(pipeline: Pipeline, tensor_bytes: NDArray[np.int64]) -> Lowered:
    """The program.

    Args:
        tensor_bytes: `[replica, microbatch, transfer]`; one replica stands for all when there is one.

    Raises:
        CheckError: the schedule makes ranks wait for each other.
    """
    rows = replica_rows(pipeline)
    parts = [_of_replica(pipeline, rows, replica, size) for replica, size in enumerate(tensor_bytes)]
    return _joined(pipeline, parts)


def replica_rows(pipeline: Pipeline) -> Rows:
    """The actions of one replica.

    Raises:
        CheckError: the schedule makes ranks wait for each other.
    """
    forward: list[list[int]] = [[] for _ in pipeline.seconds]
    backward: list[list[int]] = [[] for _ in pipeline.seconds]
    for transfer in pipeline.transfers:
        if is_ahead(transfer.activation):  # it comes behind the forward that reads what came in the last step
            forward[transfer.source].append(transfer.target)
            continue
        forward[transfer.target].append(transfer.source)
        if transfer.gradient:
            backward[transfer.source].append(transfer.target)
    return _actions(pipeline, dry_run(pipeline.schedule, forward, backward, pipeline.seconds))


def tensor_names(pipeline: Pipeline) -> tuple[str, ...]:
    """Tensor names: activation and gradient of transfer t at 2 t and 2 t + 1."""
    return tuple(name for transfer in pipeline.transfers for name in (transfer.activation, transfer.gradient))


def _ways(pipeline: Pipeline, owner: Integers) -> _Ways:
    """What each compute sends to other ranks."""
    cells: list[list[tuple[int, int]]] = [[] for _ in range(3 * len(pipeline.seconds))]
    for index, transfer in enumerate(pipeline.transfers):
        if owner[transfer.source] == owner[transfer.target]:
            continue
        cells[3 * transfer.source].append((transfer.target, 2 * index))
        if transfer.gradient:
            cells[3 * transfer.target + 1].append((transfer.source, 2 * index + 1))
    flat = [*(way for cell in cells for way in cell), (-1, -1)]
    count = np.array([len(cell) for cell in cells], dtype=np.int64)
    target, tensor = np.array(flat, dtype=np.int64).T
    return _Ways(target=target, tensor=tensor, first=np.cumsum(count) - count, count=count)


def _actions(pipeline: Pipeline, order: GlobalOrder) -> Rows:
    """Computes and both ends of all transfers of a replica, rank by rank in the global order, then its end."""
    schedule = pipeline.schedule
    owner = schedule.rank_of_stage()
    ways = _ways(pipeline, owner)
    stage, kind = schedule.stage[order.order], schedule.kind[order.order]
    cell = 3 * stage + np.array([0, 1, 1, 2])[kind]
    slots = 1 + 2 * ways.count[cell]
    maker = np.repeat(np.arange(len(stage)), slots)
    slot = np.arange(len(maker)) - (np.cumsum(slots) - slots)[maker]  # 0: the compute; odd: a send; even: its receive
    way = np.where(slot > 0, ways.first[cell][maker] + (slot - 1) // 2, len(ways.target) - 1)
    is_receive = (slot > 0) & (slot % 2 == 0)
    own = owner[stage][maker]
    peer = np.append(owner[ways.target[:-1]], -1)[way]
    row = np.where(is_receive, peer, own)
    by_rank = np.argsort(row.astype(np.uint16) if len(pipeline.ranks[0]) <= _SHORT_KEYS else row, kind="stable")
    maker, slot, way, is_receive = maker[by_rank], slot[by_rank], way[by_rank], is_receive[by_rank]
    place_ = np.empty_like(by_rank)
    place_[by_rank] = np.arange(len(by_rank))
    rows = Rows(
        row=row[by_rank],
        kind=np.where(slot == 0, kind[maker], np.where(is_receive, RECV, SEND)),
        stage=np.where(is_receive, ways.target[way], stage[maker]),
        microbatch=schedule.microbatch[order.order][maker],
        other=np.where(is_receive, own[by_rank], peer[by_rank]),
        tensor=ways.tensor[way],
        level=order.level[order.order][maker] + (slot > 0),
        match=place_[by_rank - is_receive],
    )
    return _with_finish(pipeline, rows, owner, int(order.level.max(initial=0)) + 2)


def _with_finish(pipeline: Pipeline, rows: Rows, owner: Integers, level: int) -> Rows:
    """Behind each rank's actions the reductions of its stages, all sums over stages in one order, and one update."""
    ranks = len(pipeline.schedule.first) - 1
    finish: list[tuple[int, int, int, int, int]] = []  # pipeline rank, kind, stage, level, number of the tie
    met = level + max(np.bincount(owner).tolist())  # behind the reductions of every rank
    for row in range(ranks):
        stages = [int(stage) for stage in np.nonzero(owner == row)[0]]
        reduced = [stage for stage in stages if pipeline.reduce_bytes[stage] > 0]
        finish += [(row, REDUCE, stage, level + index, -1) for index, stage in enumerate(reduced)]
        for number, tie in enumerate(pipeline.ties):
            finish += [(row, TIE, stage, met + number, number) for stage in tie.stages if stage in stages][:1]
        last = met + len(pipeline.ties) if pipeline.ties else level + len(reduced)
        finish.append((row, STEP, stages[0], last, -1))
    added = np.array(finish, dtype=np.int64).reshape(-1, 5).T
    at = np.searchsorted(rows.row, np.arange(ranks) + 1)[added[0]]  # behind the last action of the rank
    none = np.full(len(at), -1, dtype=np.int64)
    shift = np.arange(len(rows.row)) + np.searchsorted(at, np.arange(len(rows.row)), side="right")
    own = at + np.arange(len(at))
    parts = (added[0], added[1], added[2], added[4], none, none, added[3], own)
    fields = (*columns_of_rows(rows)[:-1], shift[rows.match])
    return Rows(*(np.insert(field, at, part) for field, part in zip(fields, parts, strict=True)))


def columns_of_rows(rows: Rows) -> tuple[Integers, ...]:
    return (rows.row, rows.kind, rows.stage, rows.microbatch, rows.other, rows.tensor, rows.level, rows.match)


def _of_replica(
    pipeline: Pipeline, rows: Rows, replica: int, tensor_bytes: NDArray[np.int64]
) -> tuple[int, Rows, NDArray[np.int64]]:
    """The replica's actions and their bytes, empty transfers left out."""
    sizes = np.zeros(len(rows.row), dtype=np.int64)
    (transfers,) = np.nonzero(rows.tensor >= 0)
    by_tensor = _joined_bytes(pipeline, tensor_bytes)
    sizes[transfers] = by_tensor[rows.microbatch[transfers], rows.tensor[transfers]]
    others = rows.tensor < 0
    sizes[others] = shared_sizes(pipeline, rows)[others]
    if pipeline.alone_bytes:
        (alone,) = np.nonzero(
            (rows.kind <= I) & (rows.microbatch % pipeline.batch_factor != _turn(pipeline)[rows.kind])
        )
        sizes[alone] = np.array(pipeline.alone_bytes)[rows.stage[alone], np.minimum(rows.kind[alone], B)]
    kept = others | (sizes > 0)
    if kept.all():
        return replica, rows, sizes
    fields = [field[kept] for field in columns_of_rows(rows)]
    fields[-1] = (np.cumsum(kept) - 1)[fields[-1]]
    return replica, Rows(*fields), sizes[kept]


def _turn(pipeline: Pipeline) -> Integers:
    """[kind] in which of the microbatches that they run at once layers work: see `runs_with`."""
    last = pipeline.batch_factor - 1
    return np.array([0 if kind == "F" else last for kind in KINDS], dtype=np.int64)


def _joined_bytes(pipeline: Pipeline, tensor_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """`[microbatch, tensor]`: tensors of several microbatches go with the first of them, their gradients with the last.

    Args:
        tensor_bytes: `[microbatch, transfer]`.
    """
    sizes = np.repeat(tensor_bytes, 2, axis=1)
    together = np.array([transfer.together for transfer in pipeline.transfers], dtype=bool)
    if together.any():
        factor = pipeline.batch_factor
        sums = tensor_bytes.reshape(-1, factor, tensor_bytes.shape[1]).sum(axis=1)[:, together]
        joined = np.zeros((len(sums), factor, sums.shape[1], 2), dtype=np.int64)
        joined[:, 0, :, 0] = joined[:, -1, :, 1] = sums
        sizes[:, np.repeat(together, 2)] = joined.reshape(len(tensor_bytes), -1)
    return sizes


def shared_sizes(pipeline: Pipeline, rows: Rows) -> NDArray[np.int64]:
    """Of each action the bytes among ranks with the same weights; the update of a rank stands at its first stage."""
    shared = pipeline.shared_bytes or tuple(SharedBytes(reduce=size) for size in pipeline.reduce_bytes)
    sizes = np.zeros((len(shared), len(KINDS)), dtype=np.int64)
    sizes[:, F], sizes[:, B], sizes[:, REDUCE], update = np.array(shared, dtype=np.int64).T
    sizes[:, I] = sizes[:, B]
    owner = pipeline.schedule.rank_of_stage()
    first = np.array([np.argmax(owner == row) for row in owner])
    np.add.at(sizes[:, STEP], first, update)
    of_actions: NDArray[np.int64] = sizes[rows.stage, rows.kind]
    (ties,) = np.nonzero(rows.kind == TIE)
    of_actions[ties] = np.array([tie.bytes for tie in pipeline.ties], dtype=np.int64)[rows.microbatch[ties]]
    return of_actions


def _joined(pipeline: Pipeline, parts: list[tuple[int, Rows, NDArray[np.int64]]]) -> Lowered:
    """All replicas, ordered by rank."""
    count = len(pipeline.schedule.first) - 1
    numbers = np.array([pipeline.ranks[replica] for replica, _, _ in parts], dtype=np.int64)  # [listed, pipeline rank]
    bounds = [np.searchsorted(rows.row, np.arange(count + 1)) for _, rows, _ in parts]
    listed = sorted((int(numbers[part, row]), part, row) for part in range(len(parts)) for row in range(count))
    offsets = np.cumsum([0, *(len(rows.row) for _, rows, _ in parts)])
    pieces = [np.arange(bounds[part][row], bounds[part][row + 1]) + offsets[part] for _, part, row in listed]
    take: NDArray[np.int64] | slice = np.concatenate(pieces) if len(parts) > 1 else slice(None)
    match = np.concatenate([rows.match + offset for (_, rows, _), offset in zip(parts, offsets, strict=False)])
    if isinstance(take, np.ndarray):
        place_ = np.empty_like(take)
        place_[take] = np.arange(len(take))
        match = place_[match[take]]

    def column(name: str) -> Integers:
        values = [getattr(rows, name) for _, rows, _ in parts]
        result: Integers = values[0] if len(values) == 1 else np.concatenate(values)[take]
        return result

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
        tensors=tensor_names(pipeline),
        microbatches=pipeline.schedule.microbatches,
        replica_count=len(parts),
    )
    return Lowered(columns=columns, level=column("level"), match=match)
