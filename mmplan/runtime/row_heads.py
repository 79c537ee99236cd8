"""Rows exchanged for heads: of its rows of all heads a context-parallel rank makes all rows of some heads, and back.

Sequence parallelism by all-to-all (DeepSpeed-Ulysses, arXiv 2309.14509): attention of a head needs all rows, and no
other head. Autograd keeps nothing for it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmplan.runtime.context import OwnRowsOf, rank_order
from mmplan.runtime.network import all_to_all
from mmplan.runtime.tensor_sums import Peers, TensorRanks


def to_heads(parts: Sequence[Tensor], own: OwnRowsOf, ranks: TensorRanks, peers: Peers) -> tuple[Tensor, ...]:
    """Each [batch, heads, own rows, width] -> [batch, heads / cp, all rows, width]. Collective."""
    result: tuple[Tensor, ...] = _ToHeads.apply(own, ranks, peers, *parts)  # type: ignore[no-untyped-call]
    return result


def to_rows(x: Tensor, own: OwnRowsOf, ranks: TensorRanks, peers: Peers) -> Tensor:
    """The way back of one. Collective."""
    result: Tensor = _ToRows.apply(own, ranks, peers, x)  # type: ignore[no-untyped-call]
    return result


def packed_to_heads(
    parts: Sequence[Tensor], heads: Sequence[int], own: OwnRowsOf, ranks: TensorRanks, peers: Peers
) -> tuple[Tensor, ...]:
    """Each [own rows, heads * width] with at least one row -> [all rows, heads / cp * width]. Collective."""
    by_head = [torch.unflatten(x, 1, (count, -1)).transpose(0, 1)[None] for x, count in zip(parts, heads, strict=True)]
    return tuple(x[0].transpose(0, 1).flatten(1) for x in to_heads(by_head, own, ranks, peers))


def packed_to_rows(x: Tensor, heads: int, own: OwnRowsOf, ranks: TensorRanks, peers: Peers) -> Tensor:
    """The way back of one, of which a rank has so many heads. Collective."""
    by_head = torch.unflatten(x, 1, (heads, -1)).transpose(0, 1)[None]
    return to_rows(by_head, own, ranks, peers)[0].transpose(0, 1).flatten(1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: OwnRowsOf, ranks: TensorRanks, peers: Peers, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.own, ctx.ranks, ctx.peers = own, ranks, peers
        return _heads(parts, own, ranks, peers, backward=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_rows(gradients, ctx.own, ctx.ranks, ctx.peers, backward=True)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: OwnRowsOf, ranks: TensorRanks, peers: Peers, x: Tensor) -> Tensor:
        ctx.own, ctx.ranks, ctx.peers = own, ranks, peers
        (result,) = _rows((x,), own, ranks, peers, backward=False)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (result,) = _heads(gradients, ctx.own, ctx.ranks, ctx.peers, backward=True)
        return None, None, None, result


def _heads(
    parts: Sequence[Tensor], own: OwnRowsOf, ranks: TensorRanks, peers: Peers, *, backward: bool
) -> tuple[Tensor, ...]:
    """What lies behind the end of the sequence is left out."""
    by_rank = [torch.unflatten(x, 1, [peers.degree, -1]).movedim(1, 0) for x in parts]
    came = _exchanged(by_rank, ranks, peers, backward=backward)
    joined = [x.movedim(0, -3).flatten(-3, -2) for x in came]
    return tuple(x.index_select(-2, rank_order(own, x.device)) for x in joined)


def _rows(
    parts: Sequence[Tensor], own: OwnRowsOf, ranks: TensorRanks, peers: Peers, *, backward: bool
) -> tuple[Tensor, ...]:
    """What lies behind the end of the sequence is zero."""
    by_rank = []
    for x in parts:
        padded = x.new_zeros(*x.shape[:-2], peers.degree * 2 * own.size, x.shape[-1])
        padded.index_copy_(-2, rank_order(own, x.device), x)
        by_rank.append(torch.unflatten(padded, -2, [peers.degree, -1]).movedim(-3, 0))
    came = _exchanged(by_rank, ranks, peers, backward=backward)
    return tuple(x.movedim(0, 1).flatten(1, 2) for x in came)


def _exchanged(parts: Sequence[Tensor], ranks: TensorRanks, peers: Peers, *, backward: bool) -> list[Tensor]:
    """Entry i of each to rank i, in one message; what came, by rank."""
    sent = torch.cat([x.flatten(1) for x in parts], dim=1)
    received = torch.empty_like(sent)
    all_to_all(received, sent, None, None, peers.group)
    ranks.count(sent, backward=backward)
    pieces = torch.split(received, [x[0].numel() for x in parts], dim=1)
    return [piece.reshape(x.shape) for piece, x in zip(pieces, parts, strict=True)]
