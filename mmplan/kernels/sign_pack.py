"""Five bits a number: 1 of sign, 4 of magnitude on a linear scale of each block, with error feedback.

Of n numbers remain ceil(n/8) + ceil(n/2) bytes and 4 per block: 0.64 bytes each with blocks of 256.
"""

from typing import NamedTuple, no_type_check

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmplan.kernels.dispatch import jit, launch, tl, uses_triton
from mmplan.kernels.tuning import tile_of

LEVELS = 15  # magnitudes 0..15 in 4 bits: multiples of a fifteenth of the block's largest


class SignPacked(NamedTuple):
    """`signs` uint8 [ceil(n/8)], element 8i+j in bit j; `magnitudes` uint8 [ceil(n/2)], element 2i in the low half;
    `scales` fp32 [ceil(n/block)], the step between two magnitudes: a fifteenth of the block's largest."""

    signs: Tensor
    magnitudes: Tensor
    scales: Tensor


@jit
@no_type_check
def _sign_pack_kernel(
    x_ptr,
    old_ptr,
    signs_ptr,
    magnitudes_ptr,
    scales_ptr,
    lost_ptr,
    n,
    HAS_OLD: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Divisions are exact and products are not fused into sums (`enable_fp_fusion`): the bits are the reference's."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offset = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offset, mask=offset < n, other=0.0).to(tl.float32)
    if HAS_OLD:
        x += tl.load(old_ptr + offset, mask=offset < n, other=0.0).to(tl.float32)
    infinity = float("inf")
    magnitude = tl.abs(x)
    largest = tl.max(tl.where(magnitude < infinity, magnitude, infinity), 1, keep_dims=True)
    scale = tl.div_rn(largest, tl.full((ROWS, 1), LEVELS, tl.float32))
    usable = (scale > 0) & (scale < infinity)
    code = tl.floor(tl.div_rn(magnitude, tl.broadcast_to(tl.where(usable, scale, 1.0), (ROWS, BLOCK))) + 0.5)
    code = tl.where(usable, tl.minimum(code, LEVELS), 0.0)
    negative = (x < 0).to(tl.int32)
    tl.store(lost_ptr + offset, x - (1 - 2 * negative).to(tl.float32) * code * scale, mask=offset < n)
    tl.store(scales_ptr + row, scale, mask=row * BLOCK < n)
    signs = tl.sum(tl.reshape(negative, (ROWS, BLOCK // 8, 8)) << tl.arange(0, 8)[None, None, :], 2)
    place = row * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    tl.store(signs_ptr + place, signs.to(tl.uint8), mask=place * 8 < n)
    halves = tl.reshape(code.to(tl.int32), (ROWS, BLOCK // 2, 2)) << (4 * tl.arange(0, 2)[None, None, :])
    place = row * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(magnitudes_ptr + place, tl.sum(halves, 2).to(tl.uint8), mask=place * 2 < n)


@jit
@no_type_check
def _sign_unpack_kernel(signs_ptr, magnitudes_ptr, scales_ptr, y_ptr, n, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A byte of signs is loaded once for its eight numbers, and so is their scale: a block is a multiple of eight."""
    eight = tl.program_id(0).to(tl.int64) * (TILE // 8) + tl.arange(0, TILE // 8)[:, None]
    offset = eight * 8 + tl.arange(0, 8)[None, :]
    signs = tl.load(signs_ptr + eight, mask=eight * 8 < n, other=0).to(tl.int32)
    negative = (signs >> tl.arange(0, 8)[None, :]) & 1
    place = eight * 4 + tl.arange(0, 4)[None, :]
    magnitudes = tl.load(magnitudes_ptr + place, mask=place * 2 < n, other=0).to(tl.int32)
    code = tl.reshape((magnitudes[:, :, None] >> (4 * tl.arange(0, 2)[None, None, :])) & 15, (TILE // 8, 8))
    scale = tl.load(scales_ptr + eight * 8 // BLOCK, mask=eight * 8 < n, other=0.0)
    y = ((1 - 2 * negative) * code).to(tl.float32) * scale
    tl.store(y_ptr + offset, y, mask=offset < n)


def sign_pack(x: Tensor, residual: Tensor | None = None, *, block: int = 256) -> tuple[SignPacked, Tensor]:
    """Packs x + residual and gives what was lost: fp32 of x's shape, the next step's `residual` (error feedback).

    A block that holds an infinity or a NaN decodes to NaN throughout, so that overflow stays visible. `block` is a
    power of two, 16 or more. Not differentiable.
    """
    _check(x, residual, block)
    if not uses_triton(x, x if residual is None else residual) or x.numel() == 0:
        return sign_pack_reference(x, residual, block=block)
    flat, n, device = x.detach().contiguous().flatten(), x.numel(), x.device
    old = flat if residual is None else residual.detach().contiguous().flatten()
    tile = tile_of("sign_pack", device)
    blocks, rows = -(-n // block), max(1, tile.elements // block)
    packed = SignPacked(
        torch.empty(-(-n // 8), dtype=torch.uint8, device=device),
        torch.empty(-(-n // 2), dtype=torch.uint8, device=device),
        torch.empty(blocks, device=device),
    )
    lost = torch.empty(x.shape, device=device)
    arguments = (flat, old, *packed, lost, n, residual is not None, LEVELS, rows, block)
    launch(_sign_pack_kernel, (-(-blocks // rows),), *arguments, num_warps=tile.warps, enable_fp_fusion=False)
    return packed, lost


def sign_unpack(packed: SignPacked, n: int, *, block: int = 256, dtype: torch.dtype = torch.float32) -> Tensor:
    """The n numbers that were packed in such blocks, flat."""
    sizes, wanted = tuple(len(part) for part in packed), (-(-n // 8), -(-n // 2), -(-n // block))
    if sizes != wanted:
        raise ValueError(f"signs, magnitudes and scales {sizes} of {n} numbers in blocks of {block}: {wanted} wanted")
    if not uses_triton(*packed) or n == 0:
        return sign_unpack_reference(packed, n, block=block, dtype=dtype)
    y = torch.empty(n, dtype=dtype, device=packed.scales.device)
    tile = tile_of("sign_pack", y.device)
    arguments = (*(part.contiguous() for part in packed), y, n, block, tile.elements)
    launch(_sign_unpack_kernel, (-(-n // tile.elements),), *arguments, num_warps=tile.warps)
    return y


def sign_pack_reference(x: Tensor, residual: Tensor | None = None, *, block: int = 256) -> tuple[SignPacked, Tensor]:
    _check(x, residual, block)
    given = x.detach().float().flatten()
    given = given if residual is None else given + residual.flatten()
    blocks = pad(given, (0, -given.numel() % block)).view(-1, block)
    largest = torch.where(blocks.isfinite().all(1), blocks.abs().amax(1), torch.inf)
    scales = largest / torch.full_like(largest, LEVELS)  # by a tensor: a number's reciprocal is what CUDA multiplies by
    usable = ((scales > 0) & (scales < torch.inf))[:, None]
    codes = torch.where(usable, (blocks.abs() / scales[:, None] + 0.5).floor().clamp(max=LEVELS), 0.0)
    codes, negative = codes.flatten()[: given.numel()].to(torch.uint8), given < 0
    packed = SignPacked(pack_fields(negative.to(torch.uint8), 1), pack_fields(codes, 4), scales)
    return packed, (given - sign_unpack_reference(packed, given.numel(), block=block)).view(x.shape)


def sign_unpack_reference(
    packed: SignPacked, n: int, *, block: int = 256, dtype: torch.dtype = torch.float32
) -> Tensor:
    sign = 1 - 2 * unpack_fields(packed.signs, 1)[:n].float()
    return (sign * unpack_fields(packed.magnitudes, 4)[:n] * packed.scales.repeat_interleave(block)[:n]).to(dtype)


def pack_fields(fields: Tensor, bits: int) -> Tensor:
    """Unsigned fields of so many bits, several to a byte, the first in the lowest bits."""
    per_byte = 8 // bits
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=fields.device)
    return (pad(fields, (0, -fields.numel() % per_byte)).view(-1, per_byte) << shifts).sum(1, dtype=torch.uint8)


def unpack_fields(data: Tensor, bits: int) -> Tensor:
    """The way back of `pack_fields`, with what it filled the last byte with."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    fields: Tensor = (data[:, None] >> shifts) & (2**bits - 1)
    return fields.flatten()


def _check(x: Tensor, residual: Tensor | None, block: int) -> None:
    if block < 16 or block & (block - 1):
        raise ValueError(f"block={block} is no power of two of 16 or more")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual {tuple(residual.shape)} of x {tuple(x.shape)}")
