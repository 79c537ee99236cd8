"""Eight-bit floats with a scale per block of neighbouring elements: e4m3 (finer) and e5m2 (wider).

Of n numbers remain n bytes and 4 per block. Rounding is to nearest, ties to even, as torch's own conversion.
"""

from typing import NamedTuple, no_type_check

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmplan.kernels.dispatch import jit, launch, tl, uses_triton
from mmplan.kernels.tuning import tile_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_MANTISSA_BITS = {E4M3: 3, E5M2: 2}  # of 7 bits without the sign; IEEE-like, exponent bias 7 and 15 (OCP OFP8, table 1)


class Fp8Blocks(NamedTuple):
    """`values` in an 8-bit float type, of the shape that was given; `scales` fp32 [ceil(n/block)]: what a value is
    multiplied by."""

    values: Tensor
    scales: Tensor


@jit
@no_type_check
def _fp8_quantize_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    n,
    LARGEST: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rounds on the bits of fp32, so it runs where the device has no 8-bit floats (sm_80) and in the interpreter."""
    BIAS: tl.constexpr = (1 << (6 - MANTISSA_BITS)) - 1
    DROPPED: tl.constexpr = 23 - MANTISSA_BITS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offset = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offset, mask=offset < n, other=0.0).to(tl.float32)
    infinity = float("inf")
    magnitude = tl.abs(x)
    largest = tl.max(tl.where(magnitude < infinity, magnitude, infinity), 1, keep_dims=True)
    scale = tl.div_rn(largest, tl.full((ROWS, 1), LARGEST, tl.float32))
    usable = (scale > 0) & (scale < infinity)
    y = tl.div_rn(magnitude, tl.broadcast_to(tl.where(usable, scale, 1.0), (ROWS, BLOCK)))
    y = tl.where(usable, tl.minimum(y, LARGEST), 0.0)
    bits = y.to(tl.int32, bitcast=True)
    # Normal numbers: to nearest even by carrying into the mantissa that stays, then another bias of the exponent.
    normal = ((bits + (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA_BITS)
    # Below the smallest normal: adding 2^(23 + exponent of the smallest step) makes the sum's own rounding do it.
    MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA_BITS)
    subnormal = (y + MAGIC).to(tl.int32, bitcast=True) - ((127 + 24 - BIAS - MANTISSA_BITS) << 23)
    code = tl.where(y < 2.0 ** (1 - BIAS), subnormal, normal) | tl.where(
        usable & (x.to(tl.int32, bitcast=True) < 0), 128, 0
    )
    tl.store(codes_ptr + offset, code.to(tl.uint8), mask=offset < n)
    tl.store(scales_ptr + row, scale, mask=row * BLOCK < n)


@jit
@no_type_check
def _fp8_dequantize_kernel(
    codes_ptr, scales_ptr, y_ptr, n, MANTISSA_BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    BIAS: tl.constexpr = (1 << (6 - MANTISSA_BITS)) - 1
    sixteen = tl.program_id(0).to(tl.int64) * (TILE // 16) + tl.arange(0, TILE // 16)[:, None]
    offset = sixteen * 16 + tl.arange(0, 16)[None, :]
    code = tl.load(codes_ptr + offset, mask=offset < n, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + sixteen * 16 // BLOCK, mask=sixteen * 16 < n, other=0.0)  # BLOCK: 16 or more
    # The bits at fp32's place are the number over 2^(127 - bias), subnormal ones too.
    magnitude = ((code & 127) << (23 - MANTISSA_BITS)).to(tl.float32, bitcast=True) * 2.0 ** (127 - BIAS)
    y = tl.where(code < 128, magnitude, -magnitude) * scale
    tl.store(y_ptr + offset, y, mask=offset < n)


def fp8_quantize(x: Tensor, kind: torch.dtype = E4M3, *, block: int = 128) -> Fp8Blocks:
    """Blocks run along the flattened x; the largest magnitude of each becomes the largest of `kind` (448 or 57344).

    A block that holds an infinity or a NaN dequantises to NaN throughout, so that overflow stays visible. `block` is a
    power of two, 16 or more. Not differentiable.
    """
    _check(kind, block)
    if not uses_triton(x) or x.numel() == 0:
        return fp8_quantize_reference(x, kind, block=block)
    flat, n = x.detach().contiguous().flatten(), x.numel()
    tile = tile_of("fp8", x.device)
    blocks, rows = -(-n // block), max(1, tile.elements // block)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(blocks, device=x.device)
    arguments = (flat, codes, scales, n, torch.finfo(kind).max, _MANTISSA_BITS[kind], rows, block)
    launch(_fp8_quantize_kernel, (-(-blocks // rows),), *arguments, num_warps=tile.warps, enable_fp_fusion=False)
    return Fp8Blocks(codes.view(kind), scales)


def fp8_dequantize(quantized: Fp8Blocks, *, block: int = 128, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers, in the shape they had."""
    values, scales = quantized
    kind, n = values.dtype, values.numel()
    _check(kind, block)
    if scales.numel() != -(-n // block):
        raise ValueError(f"{scales.numel()} scales of {n} values in blocks of {block}: {-(-n // block)} wanted")
    if uses_triton(scales) and n > 0:
        y = torch.empty(values.shape, dtype=dtype, device=values.device)
        codes = values.contiguous().view(torch.uint8)
        tile = tile_of("fp8", y.device)
        arguments = (codes, scales.contiguous(), y, n, _MANTISSA_BITS[kind], block, tile.elements)
        launch(_fp8_dequantize_kernel, (-(-n // tile.elements),), *arguments, num_warps=tile.warps)
        return y
    return fp8_dequantize_reference(quantized, block=block, dtype=dtype)


def fp8_quantize_reference(x: Tensor, kind: torch.dtype = E4M3, *, block: int = 128) -> Fp8Blocks:
    blocks = pad(x.detach().float().flatten(), (0, -x.numel() % block)).view(-1, block)
    largest, most = torch.where(blocks.isfinite().all(1), blocks.abs().amax(1), torch.inf), torch.finfo(kind).max
    scales = largest / torch.full_like(largest, most)  # by a tensor: a number's reciprocal is what CUDA multiplies by
    usable = ((scales > 0) & (scales < torch.inf))[:, None]
    values = torch.where(usable, (blocks / scales[:, None]).clamp(-most, most), 0.0).to(kind)
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
