"""The program of a pipeline whose ranks have unlike numbers of replicas: a transfer becomes one per pair of partners.

Each rank has the actions of its pipeline rank in one replica, in their order; where a compute hands a tensor to a stage
with other replicas it sends a part to each that shares samples with its own, and gets as many gradients. All parts
stand where the tensor stood in the global order, so transfers of every pair of ranks stay in one order on both, and no
program can deadlock.
"""

from math import gcd

import numpy as np
from numpy.typing import NDArray

from mmplan.planner.border import Border
from mmplan.planner.columns import RECV, SEND, Integers, ProgramColumns
from mmplan.planner.mesh import giver, takers
from mmplan.planner.place import Lowered, Pipeline, Rows, replica_rows, shared_sizes, tensor_names


def place_meshed(pipeline: Pipeline, tensor_bytes: NDArray[np.int64], units: int) -> Lowered:
    """The program.

    Args:
        tensor_bytes: `[overlap, microbatch, transfer]`, of each transfer by what replicas of its ends share.
        units: how many units of replicas (`Plan.units`) are listed.

    Raises:
        CheckError: the schedule makes ranks wait for each other.
    """
    rows = replica_rows(pipeline)
    alike = gcd(*(mesh.dp for mesh in pipeline.meshes))
    listed = [mesh.dp // alike * units for mesh in pipeline.meshes]
    sizes, first = shared_sizes(pipeline, rows), np.searchsorted(rows.row, np.arange(len(listed) + 1))
    each = sorted(
        (pipeline.ranks[0][row] + replica * pipeline.meshes[row].width, row, replica)
        for row, count in enumerate(listed)
        for replica in range(count)
    )
    parts = [_of_rank(pipeline, rows, slice(first[row], first[row + 1]), row, one) for _, row, one in each]
    base, partner, own = (np.concatenate([part[column] for part in parts]) for column in range(3))
    dps = np.array([mesh.dp for mesh in pipeline.meshes])
    transfer = rows.tensor[base] >= 0
    other = np.where(transfer, rows.other[base], 0)
    overlap = _overlaps(own, dps[rows.row[base]], partner, dps[other])
    size = np.zeros(len(base), dtype=np.int64)
    at = base[transfer]
    size[transfer] = tensor_bytes[overlap[transfer], rows.microbatch[at], rows.tensor[at] // 2]
    size[~transfer] = sizes[base[~transfer]]
    rank_of = np.repeat(np.arange(len(each)), [len(part[0]) for part in parts])
    kept = ~transfer | (size > 0)
    base, partner, own, other, size, rank_of = (column[kept] for column in (base, partner, own, other, size, rank_of))
    kind = rows.kind[base]
    first_ranks, widths = np.array(pipeline.ranks[0]), np.array([mesh.width for mesh in pipeline.meshes])
    owner = pipeline.schedule.rank_of_stage()
    leading = [int(np.nonzero(owner == row)[0][0]) for row in range(len(listed))]
    columns = ProgramColumns(
        ranks=np.array([rank for rank, _, _ in each], dtype=np.int64),
        stages=np.array([leading[row] for _, row, _ in each], dtype=np.int64),
        replicas=np.array([replica for _, _, replica in each], dtype=np.int64),
        first=np.concatenate([[0], np.cumsum(np.bincount(rank_of, minlength=len(each)))]),
        kind=kind,
        stage=rows.stage[base],
        microbatch=rows.microbatch[base],
        peer=np.where(rows.tensor[base] >= 0, first_ranks[other] + partner * widths[other], -1),
        tensor=rows.tensor[base],
        bytes=size,
        tensors=tensor_names(pipeline),
        microbatches=pipeline.schedule.microbatches,
        replica_count=units,
        copies=_copies(pipeline, rows.tensor[base], kind),
    )
    return Lowered(columns=columns, level=rows.level[base], match=_match(rows, base, kind, own, partner))


def _copies(pipeline: Pipeline, tensor: Integers, kind: Integers) -> Integers:
    """Of each action: shards of the other replica that take rows from the first shard of one, or that give it some."""
    row_of, meshes = pipeline.schedule.rank_of_stage(), pipeline.meshes
    many = [(1, 1)]  # [tensor + 1]: taking, giving
    for transfer in pipeline.transfers:
        ends = (meshes[row_of[transfer.source]], meshes[row_of[transfer.target]])
        source, target = Border(*ends, transfer.way).seen
        for own, other in ((source, target), (target, source)):
            giving = 1 if own == other else len(giver(0, own, other))
            many.append((len(takers(0, own, other)), giving))
    counts = np.array(many, dtype=np.int64)[tensor + 1]
    copies: Integers = np.where(kind == SEND, counts[:, 0], counts[:, 1])
    return copies


def _of_rank(
    pipeline: Pipeline, rows: Rows, span: slice, row: int, replica: int
) -> tuple[Integers, Integers, Integers]:
    """(index into `rows`, replica of the other end or 0, own replica) of every action of one rank."""
    dps = np.array([mesh.dp for mesh in pipeline.meshes])
    base = np.arange(span.start, span.stop)
    transfer = rows.tensor[base] >= 0
    other_dp = np.where(transfer, dps[np.where(transfer, rows.other[base], 0)], dps[row])
    lowest = replica * other_dp // dps[row]
    fan = -(-(replica + 1) * other_dp // dps[row]) - lowest
    begins = np.cumsum(fan) - fan
    turn = np.arange(int(fan.sum())) - np.repeat(begins, fan)
    partner = np.repeat(lowest, fan) + turn
    return np.repeat(base, fan), np.where(np.repeat(transfer, fan), partner, 0), np.full(len(turn), replica)


def _overlaps(replica: Integers, own: Integers, partner: Integers, other: Integers) -> Integers:
    """As `overlap_index`."""
    unit = np.gcd(own, other)
    a, b = own // unit, other // unit
    index: Integers = replica // a * (a + b - 1) + replica % a + partner % b
    return index


def _match(rows: Rows, base: Integers, kind: Integers, own: Integers, partner: Integers) -> Integers:
    """As `Lowered.match`: a send and its receive have one place in the replica's rows and the same two replicas."""
    match = np.arange(len(base))
    (sends,), (receives,) = np.nonzero(kind == SEND), np.nonzero(kind == RECV)
    if not len(receives):
        return match
    most = 1 + int(max(own.max(), partner.max()))
    sent = (base[sends] * most + own[sends]) * most + partner[sends]
    wanted = (rows.match[base[receives]] * most + partner[receives]) * most + own[receives]
    order = np.argsort(sent)
    match[receives] = sends[order[np.searchsorted(sent, wanted, sorter=order)]]
    return match
