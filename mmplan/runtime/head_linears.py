"""Linear layers of attention whose heads tensor-parallel ranks cannot share evenly.

A key head may lie on several ranks, each with some of its queries: copies of its weights stay equal, because gradients
are summed over these ranks. Where queries fill no rank's room, the rest is zero and gets no gradient. Both are part of
the backward, so sharded state, norms and checkpoints see whole gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmplan.runtime.network import all_reduce
from mmplan.runtime.tensor_sums import TensorRanks


class HeadLinear(nn.Module):
    """x W^T (+ b). Its weight gradients are never postponed: a sum has one place in the order of all ranks.

    Args:
        copies: neighbouring ranks that have the same weights.
        columns: of the weight that are some head's.
    """

    def __init__(self, linear: nn.Linear, ranks: TensorRanks, *, copies: int, columns: int) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._ranks, self._copies, self._columns = ranks, copies, columns

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.weights_for(x))

    def weights_for(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as a product with these rows takes them."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if x.shape[0] == 0 or not weight.requires_grad:
            return weight, bias
        if self._copies > 1:
            own = (weight,) if bias is None else (weight, bias)
            weight, *biases = _SumOverCopies.apply(self._ranks, self._copies, *own)  # type: ignore[no-untyped-call]
            bias = biases[0] if biases else None
        if self._columns < weight.shape[1]:
            weight = _WithoutRest.apply(weight, self._columns)  # type: ignore[no-untyped-call]
        return weight, bias


class _SumOverCopies(torch.autograd.Function):
    """The weights themselves; their gradients are summed, in one message."""

    @staticmethod
    def forward(ctx: Any, ranks: TensorRanks, copies: int, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.copies = ranks, copies
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        all_reduce(flat, ctx.ranks.copies_of(ctx.copies))
        ctx.ranks.count(flat, backward=True)
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
        return None, None, *(piece.view_as(like) for piece, like in zip(pieces, gradients, strict=True))


class _WithoutRest(torch.autograd.Function):
    """The weight itself; the gradient of columns from `columns` on is dropped."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, columns: int) -> Tensor:
        ctx.columns = columns
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept = gradients[0].clone()
        kept[:, ctx.columns :] = 0
        return kept, None
