"""RMS norm over columns that lie on several ranks: two numbers of each row are summed, one in each pass."""

from typing import Any

import torch
from torch import Tensor

from mmplan.runtime.norms import RMS_NORM_EPS, wide
from mmplan.runtime.tensor_sums import TensorRanks


def split_rms_norm(x: Tensor, weight: Tensor, width: int, ranks: TensorRanks) -> Tensor:
    """x [rows, local columns] / rms over all `width` columns * weight; columns beyond `width` hold zeros."""
    normed: Tensor = _SplitRmsNorm.apply(x, weight, width, ranks)  # type: ignore[no-untyped-call]
    return normed


class _SplitRmsNorm(torch.autograd.Function):
    """Computed in fp32; keeps x, weight and 1 / rms, as the norm of one rank does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, width: int, ranks: TensorRanks) -> Tensor:
        squares = wide(x).pow(2).sum(-1, keepdim=True)
        ranks.reduce(squares)
        inverse_rms = torch.rsqrt(squares / width + RMS_NORM_EPS)
        ctx.save_for_backward(x, weight, inverse_rms)
        ctx.width, ctx.ranks = width, ranks
        return (wide(x) * inverse_rms * wide(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse_rms = ctx.saved_tensors
        gradient, unit = wide(gradients[0]), wide(x) * inverse_rms
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            scaled = gradient * wide(weight)
            along = (scaled * unit).sum(-1, keepdim=True)
            ctx.ranks.reduce(along, backward=True)
            of_x = (inverse_rms * (scaled - unit * along / ctx.width)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * unit).sum(0).to(weight.dtype)
        return of_x, of_weight, None, None
