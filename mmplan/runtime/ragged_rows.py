"""Two ways in which rows of samples on a mesh become rows of others: they take places in longer samples, as image
features among text positions (an asymmetric all-to-all), or are pooled with a stride (a strided reduce-scatter).

Each rank sends what others need of its own rows and nothing else; gradients go the same ways back.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mmplan.runtime.row_cuts import Ragged, row_offsets
from mmplan.runtime.row_exchange import exchanged_rows
from mmplan.runtime.row_spans import placed_spans, pooled_lengths, pooled_offsets, pooled_spans
from mmplan.runtime.shard_tensor import RaggedShard
from mmplan.scenario.scenario import Modality


def place_rows(
    shard: RaggedShard,
    firsts: Sequence[int],
    lengths: Sequence[int],
    cut: Literal["samples", "tokens"] | tuple[int, ...],
    *,
    modality: Modality,
) -> RaggedShard:
    """The samples' rows at their places among rows that are zero. Collective: one all-to-all of overlaps.

    Args:
        firsts: the row of the result at which each sample of `shard` begins.
        lengths: rows of each sample of the result.
        cut: of the result, over the same mesh axis.

    Raises:
        ValueError: samples that overlap, or do not fit.
    """
    _check_places(shard, firsts, sum(lengths))
    axis = shard_axis(shard)
    try:
        target = tuple(row_offsets(cut, lengths, shard.mesh.size(axis)))
    except ValueError as error:
        raise ValueError(f"{modality}: {error}") from None
    ranks, own = range(shard.mesh.size(axis)), shard.mesh.get_local_rank(axis)
    spans = (shard.lengths, shard.offsets, tuple(firsts), target)
    sent = [placed_spans(*spans, own, peer) for peer in ranks]
    got = [placed_spans(*spans, peer, own) for peer in ranks]
    leaving = [torch.cat([_range(s.source, s.rows) for s in to] or [_range(0, 0)]) for to in sent]
    arriving = [torch.cat([_range(s.target, s.rows) for s in of] or [_range(0, 0)]) for of in got]
    count = target[own + 1] - target[own]
    local: Tensor = _Exchange.apply(shard.local, leaving, arriving, count, shard.mesh, axis)  # type: ignore[no-untyped-call]
    spec = tuple(Ragged(cut) if isinstance(one, Ragged) else one for one in shard.spec)
    shape = torch.Size((sum(lengths), *shard.shape[1:]))
    return replace(
        shard, local=local, spec=spec, offsets=target, lengths=tuple(lengths), shape=shape, modality=modality
    )


def pool_rows(shard: RaggedShard, stride: int) -> RaggedShard:
    """The mean of every `stride` rows of each sample, on the rank that has the first of them. Collective: of a group
    that a cut goes through, the other ranks send their partial sums.

    Raises:
        ValueError: a stride below 1.
    """
    if stride < 1:
        raise ValueError(f"{shard.modality}: rows are pooled by a stride of {stride}, which starts at 1")
    axis = shard_axis(shard)
    ranks, own = range(shard.mesh.size(axis)), shard.mesh.get_local_rank(axis)
    offsets = pooled_offsets(shard.lengths, shard.offsets, stride)
    sent = [pooled_spans(shard.lengths, shard.offsets, stride, own, peer) for peer in ranks]
    got = [pooled_spans(shard.lengths, shard.offsets, stride, peer, own) for peer in ranks]
    pieces = [piece for to in sent for piece in to]
    group_of = torch.cat([torch.full((rows,), number) for number, (_, rows, _) in enumerate(pieces)] or [_range(0, 0)])
    rows_of = torch.cat([_range(first, rows) for first, rows, _ in pieces] or [_range(0, 0)])
    device = shard.local.device
    members = shard.local.index_select(0, rows_of.to(device))
    sums = members.new_zeros(len(pieces), *members.shape[1:]).index_add(0, group_of.to(device), members)
    ends = [0]
    for to in sent:
        ends.append(ends[-1] + len(to))
    leaving = [_range(first, end - first) for first, end in pairwise(ends)]
    arriving = [torch.tensor([group for _, _, group in of], dtype=torch.int64) for of in got]
    count = offsets[own + 1] - offsets[own]
    local: Tensor = _Exchange.apply(sums, leaving, arriving, count, shard.mesh, axis)  # type: ignore[no-untyped-call]
    lengths = pooled_lengths(shard.lengths, stride)
    counts = tuple(end - first for first, end in pairwise(offsets))
    spec = tuple(Ragged(counts) if isinstance(one, Ragged) else one for one in shard.spec)
    shape = torch.Size((sum(lengths), *shard.shape[1:]))
    return replace(shard, local=local / stride, spec=spec, offsets=offsets, lengths=lengths, shape=shape)


def shard_axis(shard: RaggedShard) -> int:
    """The mesh axis over which its rows are cut."""
    return next(axis for axis, one in enumerate(shard.spec) if isinstance(one, Ragged))


class _Exchange(torch.autograd.Function):
    """Rows `leaving[peer]` of one's own go to each peer; what comes is added into `count` rows, at `arriving[peer]`."""

    @staticmethod
    def forward(
        ctx: Any,
        own: Tensor,
        leaving: Sequence[Tensor],
        arriving: Sequence[Tensor],
        count: int,
        mesh: DeviceMesh,
        axis: int,
    ) -> Tensor:
        ctx.leaving, ctx.arriving, ctx.count, ctx.mesh, ctx.axis = leaving, arriving, own.shape[0], mesh, axis
        return exchanged_rows(own, leaving, arriving, count, mesh.get_local_rank(axis), mesh.get_group(axis))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mesh, axis = ctx.mesh, ctx.axis
        here, group = mesh.get_local_rank(axis), mesh.get_group(axis)
        back = exchanged_rows(gradients[0], ctx.arriving, ctx.leaving, ctx.count, here, group)
        return back, None, None, None, None, None


def _range(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count)


def _check_places(shard: RaggedShard, firsts: Sequence[int], rows: int) -> None:
    if len(firsts) != len(shard.lengths):
        raise ValueError(f"{shard.modality}: {len(firsts)} places for {len(shard.lengths)} samples")
    taken = sorted(zip(firsts, shard.lengths, strict=True))
    for first, length in taken:
        if first < 0 or first + length > rows:
            message = f"{length} rows from place {first} on end at {first + length}, of {rows} places from 0 on"
            raise ValueError(f"{shard.modality}: {message}")
    for (first, length), (later, _) in pairwise(taken):
        if first + length > later:
            message = f"{length} rows from place {first} on end at {first + length}, behind place {later} of others"
            raise ValueError(f"{shard.modality}: {message}")
