"""Five bits a number: 1 of sign, 4 of magnitude on a linear scale of each block, with error feedback (X7).

Of n numbers remain ceil(n/8) + ceil(n/2) bytes and 4 per block: 0.64 bytes each with blocks of 256.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

LEVELS = 15  # magnitudes 0..15 in 4 bits: multiples of a fifteenth of the block's largest


class SignPacked(NamedTuple):
    """`signs` uint8 [ceil(n/8)], element 8i+j in bit j; `magnitudes` uint8 [ceil(n/2)], element 2i in the low half;
    `scales` fp32 [ceil(n/block)], the step between two magnitudes: a fifteenth of the block's largest."""

    signs: Tensor
    magnitudes: Tensor
    scales: Tensor


def sign_pack(x: Tensor, residual: Tensor | None = None, *, block: int = 256) -> tuple[SignPacked, Tensor]:
    """Packs x + residual and gives what was lost: fp32 of x's shape, the next step's `residual` (error feedback).

    A block that holds an infinity or a NaN decodes to NaN throughout, so that overflow stays visible. `block` is a
    power of two, 16 or more. Not differentiable.
    """
    _check(x, residual, block)
    return sign_pack_reference(x, residual, block=block)


def sign_unpack(packed: SignPacked, n: int, *, block: int = 256, dtype: torch.dtype = torch.float32) -> Tensor:
    """The n numbers that were packed, flat."""
    return sign_unpack_reference(packed, n, block=block, dtype=dtype)


def sign_pack_reference(x: Tensor, residual: Tensor | None = None, *, block: int = 256) -> tuple[SignPacked, Tensor]:
    _check(x, residual, block)
    given = x.detach().float().flatten()
    given = given if residual is None else given + residual.flatten()
    blocks = pad(given, (0, -given.numel() % block)).view(-1, block)
    scales = torch.where(blocks.isfinite().all(1), blocks.abs().amax(1), torch.inf) / LEVELS
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
