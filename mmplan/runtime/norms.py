"""Layer and RMS norm that keep what the cost model counts: the input and the statistics of each row, in any dtype.

`F.rms_norm` is one fused kernel on CUDA, but on CPU a chain of operators that keeps fp32 copies of its input; there
the same formula runs as one autograd function.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYER_NORM_EPS = 1e-5  # torch's default, as in ViT and Whisper
RMS_NORM_EPS = 1e-6  # LLaMA's first release (facebookresearch/llama, `RMSNorm`)


class GroupedNorm(nn.Module):
    """Normalises each of `groups` equal parts of a row: [rows, width] -> [rows, width].

    Args:
        width: of a row; the scale has width / groups elements.
    """

    def __init__(self, width: int, kind: Literal["layer", "rms"], groups: int, bias: bool = True) -> None:
        super().__init__()
        self.groups, self.size, self.kind = groups, width // groups, kind
        self.weight = nn.Parameter(torch.ones(self.size))
        self.bias = nn.Parameter(torch.zeros(self.size)) if kind == "layer" and bias else None

    def forward(self, x: Tensor) -> Tensor:
        parts = x.view(x.shape[0], self.groups, self.size) if self.groups > 1 else x
        if self.kind == "layer":
            normed = F.layer_norm(parts, (self.size,), self.weight, self.bias, LAYER_NORM_EPS)
        elif x.is_cuda:
            normed = F.rms_norm(parts, (self.size,), self.weight, RMS_NORM_EPS)
        else:
            normed = rms_norm(parts, self.weight)
        return normed.view(x.shape)


def wide(x: Tensor) -> Tensor:
    """In fp32, or fp64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def _inverse_rms(x: Tensor) -> Tensor:
    return torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + RMS_NORM_EPS)


class _RmsNorm(torch.autograd.Function):
    """y = x / rms(x) * weight over the last dim, computed in fp32 or wider; keeps x, weight and 1 / rms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        inverse_rms = _inverse_rms(x)
        ctx.save_for_backward(x, weight, inverse_rms)
        return (wide(x) * inverse_rms * wide(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight, inverse_rms = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative has to see how 1 / rms depends on x
            inverse_rms = _inverse_rms(x)
        grad, unit = wide(grads[0]), wide(x) * inverse_rms
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            scaled = grad * wide(weight)
            x_grad = (inverse_rms * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))).to(x.dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = (grad * unit).flatten(0, -2).sum(0).to(weight.dtype)
        return x_grad, weight_grad


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    normed: Tensor = _RmsNorm.apply(x, weight)  # type: ignore[no-untyped-call]
    return normed
