"""Layers whose ranks have some rows each join or average every few rows: a strided reduce-scatter, whose gradient
is gathered (`cost_models/strided.py`)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mmplan.runtime.context import OwnRowsOf, rank_order, rows_of
from mmplan.runtime.network import gather, scatter_sum
from mmplan.runtime.tensor_sums import Peers, TensorRanks


def averaged_rows(x: Tensor, lengths: Sequence[int], size: int, ranks: TensorRanks, peers: Peers) -> Tensor:
    """This rank's rows of the means of every `size` rows of each sequence; `x` are its rows of these."""
    own, places, _ = _places(tuple(lengths), size, rows_of(lengths, peers), x.device)
    parts = x.new_zeros(own.degree * 2 * own.size, x.shape[1])
    mine = (places >= 0).nonzero().squeeze(1)
    return _dealt(parts.index_add(0, places[mine], x.index_select(0, mine) / size), ranks, peers)


def joined_rows(x: Tensor, lengths: Sequence[int], size: int, ranks: TensorRanks, peers: Peers) -> Tensor:
    """The same of every `size` rows in one, `size` times as wide."""
    own, places, members = _places(tuple(lengths), size, rows_of(lengths, peers), x.device)
    parts = x.new_zeros(own.degree * 2 * own.size * size, x.shape[1])
    mine = (places >= 0).nonzero().squeeze(1)
    parts = parts.index_add(0, places[mine] * size + members[mine], x.index_select(0, mine))
    return _dealt(parts.view(own.degree * 2 * own.size, size * x.shape[1]), ranks, peers)


@lru_cache(maxsize=16)
def _places(
    lengths: tuple[int, ...], size: int, source: OwnRowsOf, device: torch.device
) -> tuple[OwnRowsOf, Tensor, Tensor]:
    """This rank's rows of the results; of each of its rows where the result lies among those of all ranks, rank by rank
    (-1: in none, as rows that fill no group), and which of that one's rows it is."""
    within = torch.cat([torch.arange(length) for length in (0, *lengths)])
    kept = torch.cat([torch.arange(length) < length // size * size for length in (0, *lengths)])
    group = kept.long().cumsum(0).sub(1) // size
    own = OwnRowsOf(sum(length // size for length in lengths), source.degree, source.index)
    group[~kept] = own.count
    order = torch.cat((rank_order(own, torch.device("cpu")), torch.tensor([-1])))
    places = source.take(order[group], fill=-1)
    return own, places.to(device), (source.take(within) % size).to(device)


def _dealt(parts: Tensor, ranks: TensorRanks, peers: Peers) -> Tensor:
    """This rank's share of the sum of all ranks' parts. Collective where there are rows."""
    if not parts.shape[0]:
        return parts
    result: Tensor = _ScatterSum.apply(parts, ranks, peers)  # type: ignore[no-untyped-call]
    return result


class _ScatterSum(torch.autograd.Function):
    """A share of a sum; its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, ranks: TensorRanks, peers: Peers) -> Tensor:
        ctx.ranks, ctx.peers = ranks, peers
        own = parts.new_empty(parts.shape[0] // peers.degree, parts.shape[1])
        scatter_sum(own, parts.contiguous(), peers.group)
        ranks.count(parts, backward=False)
        return own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        everything = gradient.new_empty(ctx.peers.degree * gradient.shape[0], gradient.shape[1])
        gather(everything, gradient, ctx.peers.group)
        ctx.ranks.count(everything, backward=True)
        return everything, None, None
