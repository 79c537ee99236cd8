"""Sign and 4 bits, and 8-bit floats: the bits of the reference, in every type, at every length."""

import pytest
import torch
from kernel_inputs import DEVICE, DTYPES, every_second_column, random, same
from torch import Tensor

from mmplan.kernels.fp8 import (
    E4M3,
    E5M2,
    fp8_dequantize,
    fp8_dequantize_reference,
    fp8_quantize,
    fp8_quantize_reference,
)
from mmplan.kernels.sign_pack import sign_pack, sign_pack_reference, sign_unpack, sign_unpack_reference

LENGTHS = (0, 1, 15, 255, 257, 2049)  # around a block of 256 and a tile of 2048


def of_many_sizes(n: int, dtype: torch.dtype) -> Tensor:
    """From 1e-6 to 1e6, so that blocks hold subnormal codes; a block of zeros, two with NaN or infinity."""
    x = random(n).mul(random(n, seed=1).mul(3).exp())
    if n > 1000:
        x[256:512], x[600], x[900] = 0, float("nan"), -float("inf")
        x[1024:1280] = 22 * 2.0**-149  # a fifteenth of it rounds to one smallest number: 22 of them, more than 15
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_packed_bits_and_residual_are_the_references(n: int, dtype: torch.dtype) -> None:
    x, residual = of_many_sizes(n, dtype), random(n, seed=2)
    for block in (16, 256):
        for old in (None, residual):
            (packed, lost), expected = sign_pack(x, old, block=block), sign_pack_reference(x, old, block=block)
            same([*packed, lost], [*expected[0], expected[1]])
            y = sign_unpack(packed, n, block=block)
            same([y], [sign_unpack_reference(packed, n, block=block)])
            given = x.float() if old is None else x.float() + old
            same([lost], [given - y])


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_eight_bit_floats_are_those_of_torch(n: int, dtype: torch.dtype, kind: torch.dtype) -> None:
    x = of_many_sizes(n, dtype)
    for block in (16, 128):
        found, expected = fp8_quantize(x, kind, block=block), fp8_quantize_reference(x, kind, block=block)
        same([found.values.view(torch.uint8), found.scales], [expected.values.view(torch.uint8), expected.scales])
        same([fp8_dequantize(found, block=block)], [fp8_dequantize_reference(found, block=block)])


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_every_eight_bit_float_comes_back_as_it_was(kind: torch.dtype) -> None:
    """All 256 codes but NaN and infinity; the scale is 1 as the largest is among them."""
    values = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(kind).float()
    values = torch.where(values.isfinite(), values, 0.0)
    quantized = fp8_quantize(values, kind, block=256)
    assert quantized.scales.tolist() == [1.0]
    same([fp8_dequantize(quantized, block=256)], [values])


def test_strides_of_the_input_do_not_matter_and_shapes_come_back() -> None:
    x = every_second_column(random(6, 50)).T
    packed, lost = sign_pack(x, block=16)
    same([lost], [(x.flatten() - sign_unpack(packed, x.numel(), block=16)).view(x.shape)])
    quantized = fp8_quantize(x, block=16)
    assert quantized.values.shape == x.shape
    same(
        [fp8_dequantize(quantized, block=16)], [fp8_dequantize_reference(fp8_quantize_reference(x, block=16), block=16)]
    )
