"""Rows under way between tokens and experts on other ranks, and rows that tp ranks hold in parts.

Autograd keeps indices only. Bytes are counted where the tokens are: rows of a rank's own tokens, each way.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmplan.runtime.network import all_to_all, gather
from mmplan.runtime.tensor_sums import ExpertRanks, TensorRanks


@dataclass(frozen=True, slots=True)
class Exchange:
    """One microbatch's rows at the experts of one layer.

    sent, received: rows to and from each rank of the group. order: of the rows that came, expert by expert. rows: of
    each expert here.
    """

    sent: list[int]
    received: list[int]
    order: Tensor
    rows: list[int]


def plan_exchange(rows_per_expert: list[int], experts: ExpertRanks, device: torch.device) -> Exchange:
    """From the rows of this rank's tokens at each of all experts; collective over the group."""
    sent = torch.tensor(rows_per_expert, dtype=torch.int64, device=device).view(experts.degree, -1)
    received = torch.empty_like(sent)
    all_to_all(received, sent, None, None, experts.group)
    here = torch.arange(sent.shape[1], device=device).repeat(experts.degree)
    return Exchange(
        sent=sent.sum(1).tolist(),
        received=received.sum(1).tolist(),
        order=here.repeat_interleave(received.flatten()).argsort(stable=True),
        rows=received.sum(0).tolist(),
    )


def to_experts(x: Tensor, exchange: Exchange, ranks: TensorRanks) -> Tensor:
    """x [sum of sent, width], sorted by expert -> [sum of received, width], expert by expert."""
    came: Tensor = _Swap.apply(x, exchange.sent, exchange.received, ranks, True)  # type: ignore[no-untyped-call]
    return came.index_select(0, exchange.order)


def from_experts(x: Tensor, exchange: Exchange, ranks: TensorRanks) -> Tensor:
    """The way back of `to_experts`."""
    back = x.index_select(0, exchange.order.argsort())
    result: Tensor = _Swap.apply(back, exchange.received, exchange.sent, ranks, False)  # type: ignore[no-untyped-call]
    return result


def own_rows(x: Tensor, ranks: TensorRanks) -> Tensor:
    """This rank's part of rows that all ranks of the tensor-parallel group hold alike; a last one may have fewer."""
    if not x.is_floating_point():
        return _part(x, ranks)
    result: Tensor = _OwnRows.apply(x, ranks)  # type: ignore[no-untyped-call]
    return result


def join_rows(x: Tensor, rows: int, ranks: TensorRanks) -> Tensor:
    """All `rows` of which each rank has its part."""
    result: Tensor = _JoinRows.apply(x, rows, ranks)  # type: ignore[no-untyped-call]
    return result


class _Swap(torch.autograd.Function):
    """An all-to-all of rows; `out`: from tokens to experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], ranks: TensorRanks, out: bool) -> Tensor:
        ctx.sent, ctx.received, ctx.ranks, ctx.out = sent, received, ranks, out
        result = _swapped(x, sent, received, ranks)
        ranks.count(x if out else result, backward=False)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        result = _swapped(gradients[0], ctx.received, ctx.sent, ctx.ranks)
        ctx.ranks.count(result if ctx.out else gradients[0], backward=True)
        return result, None, None, None, None


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.rows, ctx.ranks = x.shape[0], ranks
        return _part(x, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _joined(gradients[0], ctx.rows, ctx.ranks, backward=True), None


class _JoinRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _joined(x, rows, ranks, backward=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _part(gradients[0], ctx.ranks), None, None


def _swapped(x: Tensor, sent: list[int], received: list[int], ranks: TensorRanks) -> Tensor:
    assert ranks.experts is not None
    result = x.new_empty(sum(received), x.shape[1])
    all_to_all(result, x.contiguous(), received, sent, ranks.experts.group)
    return result


def _part(x: Tensor, ranks: TensorRanks) -> Tensor:
    """A copy, so that nobody keeps all rows for it."""
    size = -(-x.shape[0] // ranks.degree)
    first = min(ranks.index * size, x.shape[0])
    return x.narrow(0, first, min(size, x.shape[0] - first)).clone()


def _joined(part: Tensor, rows: int, ranks: TensorRanks, *, backward: bool) -> Tensor:
    size = -(-rows // ranks.degree)
    padded = part.new_zeros(size, part.shape[1])
    padded[: part.shape[0]] = part
    whole = part.new_empty(size * ranks.degree, part.shape[1])
    if rows:
        gather(whole, padded, group=ranks.group)
    ranks.count(whole, backward=backward)
    return whole[:rows]
