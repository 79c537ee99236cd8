"""A message says what its format says, in the bytes that its format counts, and what it leaves out is given back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmplan.cost_models.compressed_bytes import TOP_K_FP8, TOP_K_SIGN, GradientFormat, index_bytes
from mmplan.runtime.compression.codec import add_decoded, encode
from mmplan.runtime.compression.indices import pack_indices, unpack_indices

FORMATS = {
    "sign4": TOP_K_SIGN,
    "fp8": TOP_K_FP8,
    "all in fp8": GradientFormat(values="fp8", fraction=1, block=128),
    "few": GradientFormat(values="sign4", fraction=0.001, block=16),
}
SIZES = (0, 1, 1023, 1024, 1025, 65_535, 65_537, 200_003)


def numbers(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).pow(3)


def decoded(message: Tensor, size: int, form: GradientFormat) -> Tensor:
    total = torch.zeros(size)
    add_decoded(message, total, form)
    return total


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_a_message_has_the_bytes_of_its_format_and_message_and_loss_are_the_gradient(
    form: GradientFormat, size: int
) -> None:
    x = numbers(size)
    message, lost = encode(x, form)
    assert message.dtype == torch.uint8 and message.numel() == form.wire_bytes(size)
    torch.testing.assert_close(decoded(message, size, form) + lost, x, atol=1e-6, rtol=1e-6)


def test_small_tensors_are_exact() -> None:
    x = numbers(1023)
    message, lost = encode(x, TOP_K_SIGN)
    assert torch.equal(decoded(message, 1023, TOP_K_SIGN), x) and not lost.any()


def test_the_largest_are_sent_and_each_within_half_a_step() -> None:
    x = numbers(50_000)
    message, _ = encode(x, TOP_K_SIGN)
    said = decoded(message, x.numel(), TOP_K_SIGN)
    largest = x.abs().topk(2500).indices
    others = torch.ones(x.numel(), dtype=torch.bool)
    others[largest] = False
    assert not said[others].any()
    assert float((said - x)[largest].abs().max()) <= float(x.abs().max()) / 15 / 2 * 1.001


@given(st.integers(1, 300_000), st.floats(0, 1), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_indices_come_back_in_the_bytes_that_are_counted(elements: int, fraction: float, seed: int) -> None:
    kept = max(1, int(fraction**3 * elements))
    indices = torch.randperm(elements, generator=torch.Generator().manual_seed(seed))[:kept].sort().values
    packed = pack_indices(indices, elements)
    assert packed.numel() == index_bytes(elements, kept)
    assert torch.equal(unpack_indices(packed, elements, kept), indices)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_overflow_is_said_and_not_hidden(bad: float) -> None:
    x = numbers(5000)
    x[4321] = bad
    for form in (TOP_K_SIGN, TOP_K_FP8):
        assert not decoded(encode(x, form)[0], 5000, form).isfinite().all()
