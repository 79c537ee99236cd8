"""Ring attention: keys and values of context-parallel ranks pass around (arXiv 2310.01889).

While a rank attends to the rows at hand, these are on their way to the next rank and others come from the one before:
beside its own it holds what is at hand and what comes. In the backward they pass around again, and each rank's rows
collect their gradients on the way, one place behind, until they come home. Autograd keeps what one process would.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmplan.runtime.block_attention import Pair, Part, attend, attend_back, join, wide_type
from mmplan.runtime.network import Passing, pass_on
from mmplan.runtime.tensor_sums import Peers, TensorRanks

# What a rank's queries see of the keys of a rank: nothing of what is left out.
Pairs = Callable[[int], Sequence[Pair]]


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, ranks: TensorRanks, peers: Peers, scale: float | None = None
) -> Tensor:
    """A rank's queries against the keys and values of all: [batch, own rows, heads, width] each, rows of all ranks
    equally many -> [batch, own rows, heads, width of v]. Queries that see nothing get zeros. Collective."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    result: Tensor = _Ring.apply(q, k, v, pairs, ranks, peers, scale)  # type: ignore[no-untyped-call]
    return result


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, ranks: TensorRanks, peers: Peers, scale: float
    ) -> Tensor:
        batch, rows, heads = q.shape[:3]
        total = q.new_zeros(batch, rows, heads, v.shape[3], dtype=wide_type(q.dtype))
        logs = total.new_full((batch, heads, rows), -torch.inf)
        ctx.state = ()
        keys, values = k, v
        for hop in range(peers.degree):
            coming = _passed((keys, values), hop, ranks, peers, backward=False)
            for pair in pairs((peers.index - hop) % peers.degree):
                part = attend(q, keys, values, pair, scale)
                join(total, logs, part, pair)
                ctx.state = part.state or ctx.state
            keys, values = (keys, values) if coming is None else coming.there()
        result = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, logs)
        ctx.pairs, ctx.ranks, ctx.peers, ctx.scale = pairs, ranks, peers, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, result, logs = ctx.saved_tensors
        ranks, peers, whole = ctx.ranks, ctx.peers, Part(result, logs, ctx.state)
        products = (result.to(logs.dtype) * gradient).sum(3).transpose(1, 2)
        of_queries = torch.zeros_like(q, dtype=logs.dtype)
        returns = any(ctx.needs_input_grad[1:3])
        home: list[Tensor] = []
        behind: Passing | None = None
        keys, values = k, v
        for hop in range(peers.degree):
            coming = _passed((keys, values), hop, ranks, peers, backward=True)
            sums = [torch.zeros_like(x, dtype=logs.dtype) for x in (keys, values)]
            for pair in ctx.pairs((peers.index - hop) % peers.degree):
                found = attend_back(q, keys, values, pair, ctx.scale, whole, gradient, products)
                pair.of_queries(of_queries).add_(found[0])
                for total, own in zip(sums, found[1:], strict=True):
                    pair.of_keys(total).add_(own)
            if hop == 0:
                home = sums
            elif returns:
                _add(sums, behind)
                behind = _sent([total.to(k.dtype) for total in sums], ranks, peers, backward=True)
            keys, values = (keys, values) if coming is None else coming.there()
        _add(home, behind)
        of_keys, of_values = (total.to(k.dtype) if returns else None for total in home)
        return of_queries.to(q.dtype), of_keys, of_values, None, None, None, None


def _passed(parts: Sequence[Tensor], hop: int, ranks: TensorRanks, peers: Peers, *, backward: bool) -> Passing | None:
    """Keys and values on their way to the next rank, until each has seen all."""
    return None if hop == peers.degree - 1 else _sent(parts, ranks, peers, backward=backward)


def _sent(parts: Sequence[Tensor], ranks: TensorRanks, peers: Peers, *, backward: bool) -> Passing:
    assert peers.group is not None
    for part in parts:
        ranks.count(part, backward=backward)
    return pass_on(parts, peers.group)


def _add(sums: Sequence[Tensor], coming: Passing | None) -> None:
    if coming is not None:
        for total, part in zip(sums, coming.there(), strict=True):
            total.add_(part)
