"""Collectives that can be differentiated any number of times: the backward of each is another of them.

The derivative taken is that of the *sum* over ranks of what each rank calls `backward` on. So the backward of a sum is
a sum, of a gather a sum of each rank's own rows, of a shift along the ring a shift against it. The graphs of all ranks
of a group have to be alike, or backwards wait for each other for ever. `group=None` means all processes, or this one
alone where torch.distributed is not initialised.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def place_in(group: Group) -> tuple[int, int]:
    """This process's index in the group, and the group's size."""
    if group is None and not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def row_counts(rows: int, group: Group, device: torch.device) -> tuple[int, ...]:
    """The `rows` of every rank of the group."""
    _, size = place_in(group)
    if size == 1:
        return (rows,)
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([rows], device=device), group=group)
    return tuple(int(count) for count in counts)


def reduce_(tensor: Tensor, group: Group, *, largest: bool = False) -> Tensor:
    """Sum (or maximum) over the ranks, in place and not differentiated."""
    if place_in(group)[1] > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return tensor


def all_sum(x: Tensor, group: Group = None) -> Tensor:
    """Sum of all ranks' `x`."""
    result: Tensor = _AllSum.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def total_loss(share: Tensor, group: Group = None, *, averaged: bool) -> Tensor:
    """The sum of all ranks' shares of one loss, on each of them; `backward` differentiates the share of each rank.

    Args:
        averaged: gradients of parameters are averaged over the group afterwards, as DDP and FSDP do, and not summed:
            each share then counts as often as the group has ranks.
    """
    result: Tensor = _TotalLoss.apply(share, group, averaged)  # type: ignore[no-untyped-call]
    return result


def gather_rows(x: Tensor, group: Group = None) -> Tensor:
    """The rows of all ranks in their order, equally many of each: [own rows, ...] -> [ranks x own rows, ...]."""
    result: Tensor = _GatherRows.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def scatter_sum(x: Tensor, group: Group = None) -> Tensor:
    """This rank's rows of the sum of all ranks' `x`: [ranks x own rows, ...] -> [own rows, ...]."""
    result: Tensor = _ScatterSum.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def shift(x: Tensor, by: int, group: Group = None) -> Tensor:
    """`x` of the rank `by` (1 or -1) places back in the ring; the same shape on every rank."""
    result: Tensor = _Shift.apply(x, by, group)  # type: ignore[no-untyped-call]
    return result


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return all_sum(gradients[0], ctx.group), None


class _TotalLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, group: Group, averaged: bool) -> Tensor:
        ctx.factor = place_in(group)[1] if averaged else 1
        return reduce_(share.clone(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] * ctx.factor, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        _, size = place_in(group)
        if size == 1:
            return x.clone()
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return scatter_sum(gradients[0], ctx.group), None


class _ScatterSum(torch.autograd.Function):
    """Every rank adds the parts for its rows in the order of ranks: the same bits in each run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        _, size = place_in(group)
        if size == 1:
            return x.clone()
        parts = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(parts, x.contiguous(), group=group)
        return parts.view(size, len(x) // size, *x.shape[1:]).sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gather_rows(gradients[0], ctx.group), None


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: int, group: Group) -> Tensor:
        ctx.by, ctx.group = by, group
        rank, size = place_in(group)
        peers = [(rank + by) % size, (rank - by) % size]
        if group is not None:
            peers = [dist.get_global_rank(group, peer) for peer in peers]
        sent, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        transfers = [dist.P2POp(dist.isend, sent, peers[0], group), dist.P2POp(dist.irecv, received, peers[1], group)]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return shift(gradients[0], -ctx.by, ctx.group), None, None
