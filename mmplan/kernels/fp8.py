"""Eight-bit floats with a scale per block of neighbouring elements: e4m3 (finer) and e5m2 (wider) (X8).

Of n numbers remain n bytes and 4 per block. Rounding is to nearest, ties to even, as torch's own conversion.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Fp8Blocks(NamedTuple):
    """`values` in an 8-bit float type, of the shape that was given; `scales` fp32 [ceil(n/block)]: what a value is
    multiplied by."""

    values: Tensor
    scales: Tensor


def fp8_quantize(x: Tensor, kind: torch.dtype = E4M3, *, block: int = 128) -> Fp8Blocks:
    """Blocks run along the flattened x; the largest magnitude of each becomes the largest of `kind` (448 or 57344).

    A block that holds an infinity or a NaN dequantises to NaN throughout, so that overflow stays visible. `block` is a
    power of two, 16 or more. Not differentiable.
    """
    _check(kind, block)
    return fp8_quantize_reference(x, kind, block=block)


def fp8_dequantize(quantized: Fp8Blocks, *, block: int = 128, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers, in the shape they had."""
    _check(quantized.values.dtype, block)
    return fp8_dequantize_reference(quantized, block=block, dtype=dtype)


def fp8_quantize_reference(x: Tensor, kind: torch.dtype = E4M3, *, block: int = 128) -> Fp8Blocks:
    blocks = pad(x.detach().float().flatten(), (0, -x.numel() % block)).view(-1, block)
    scales = torch.where(blocks.isfinite().all(1), blocks.abs().amax(1), torch.inf) / torch.finfo(kind).max
    usable = ((scales > 0) & (scales < torch.inf))[:, None]
    largest = torch.finfo(kind).max
    values = torch.where(usable, (blocks / scales[:, None]).clamp(-largest, largest), 0.0).to(kind)
    return Fp8Blocks(values.flatten()[: x.numel()].view(x.shape), scales)


def fp8_dequantize_reference(quantized: Fp8Blocks, *, block: int = 128, dtype: torch.dtype = torch.float32) -> Tensor:
    values, scales = quantized
    scale = scales.repeat_interleave(block)[: values.numel()].view(values.shape)
    return (values.float() * scale).to(dtype)


def _check(kind: torch.dtype, block: int) -> None:
    if kind not in (E4M3, E5M2):
        raise ValueError(f"{kind} is neither float8_e4m3fn nor float8_e5m2")
    if block < 16 or block & (block - 1):
        raise ValueError(f"block={block} is no power of two of 16 or more")
