"""Mixture of experts on packed rows in one process: rows sorted by expert, one matrix product per expert.

Only integers are computed from the chosen experts; what autograd keeps is what the cost model counts.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmplan.runtime.rows import with_zero_row


class ExpertLinear(nn.Module):
    """`experts` linears without bias, one after the other on their own rows; torch's initialisation of a linear."""

    def __init__(self, experts: int, in_width: int, out_width: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_width)
        self.weight = nn.Parameter(torch.empty(experts, out_width, in_width).uniform_(-bound, bound))

    def forward(self, x: Tensor, rows: list[int]) -> Tensor:
        """x [sum of rows, in_width], sorted by expert -> [sum of rows, out_width]."""
        weights = self.weight.unbind(0)
        used = [(piece, weight) for piece, weight in zip(torch.split(x, rows), weights, strict=True) if piece.shape[0]]
        outputs = [F.linear(piece, weight) for piece, weight in used or [(x, weights[0])]]
        return torch.cat(outputs)


def top_experts(scores: Tensor, topk: int) -> Tensor:
    """[tokens, experts] -> expert numbers [tokens, topk]."""
    return scores.topk(topk, dim=1).indices


def expert_weights(kind: str, scores: Tensor, chosen: Tensor) -> Tensor:
    """Weights [tokens, topk] of the chosen experts, computed in fp32 (see `ops.Route`)."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    if kind == "softmax_all":
        weights = _pick(wide.softmax(1), chosen)
    elif kind == "softmax":
        weights = _pick(wide, chosen).softmax(1)
    else:
        weights = _pick(wide, chosen).sigmoid()
        if kind == "sigmoid":
            weights = weights / weights.sum(1, keepdim=True)
    return weights.to(scores.dtype, copy=True)


def _pick(scores: Tensor, chosen: Tensor) -> Tensor:
    """The chosen columns of each row; unlike `gather`, selecting from flat scores keeps the indices only."""
    firsts = torch.arange(scores.shape[0], device=scores.device).unsqueeze(1) * scores.shape[1]
    return scores.flatten().index_select(0, (firsts + chosen).flatten()).view(chosen.shape)


def rows_per_expert(chosen: Tensor, experts: int, capacity: float | None) -> list[int]:
    """How many rows each expert computes."""
    if capacity is not None:
        return [_capacity_rows(chosen, experts, capacity)] * experts
    counts: list[int] = chosen.flatten().bincount(minlength=experts).tolist()
    return counts


def dispatch(x: Tensor, chosen: Tensor, experts: int, capacity: float | None) -> Tensor:
    """Copies of the rows of x [tokens, width], sorted by expert."""
    order = chosen.flatten().argsort(stable=True)
    sources = order // chosen.shape[1]
    if capacity is None:
        return x.index_select(0, sources)
    rows = _capacity_rows(chosen, experts, capacity)
    filled = torch.full((experts * rows + 1,), x.shape[0], device=x.device)
    filled[_slots(chosen, order, experts, rows)] = sources
    return with_zero_row(x).index_select(0, filled[:-1])


def combine(y: Tensor, chosen: Tensor, weights: Tensor, experts: int, capacity: float | None) -> Tensor:
    """Weighted sum of each token's rows: y, sorted by expert -> [tokens, width]."""
    order = chosen.flatten().argsort(stable=True)
    if capacity is None:
        gathered = y.index_select(0, order.argsort())
    else:
        slots = torch.empty_like(order)
        slots[order] = _slots(chosen, order, experts, _capacity_rows(chosen, experts, capacity))
        gathered = with_zero_row(y).index_select(0, slots)
    return (gathered.view(*chosen.shape, y.shape[1]) * weights.unsqueeze(2)).sum(1)


def _capacity_rows(chosen: Tensor, experts: int, capacity: float) -> int:
    return math.ceil(capacity * chosen.numel() / experts)


def _slots(chosen: Tensor, order: Tensor, experts: int, rows: int) -> Tensor:
    """Row of each sorted copy where every expert has `rows` rows; the row after all of them for what is dropped."""
    sorted_experts = chosen.flatten()[order]
    firsts = torch.searchsorted(sorted_experts, torch.arange(experts, device=order.device))
    place = torch.arange(order.shape[0], device=order.device) - firsts[sorted_experts]
    return torch.where(place < rows, sorted_experts * rows + place, experts * rows)
