"""What the cases of all kernels share. They run on the device that TEST_DEVICE names: cuda, or the CPU, where Triton's
interpreter takes the kernels if TRITON_INTERPRET=1 is set before anything imports Triton."""

import os
from collections.abc import Iterable

import torch
from torch import Tensor

from mmplan.kernels.dispatch import interpreted

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
assert interpreted() or DEVICE.type == "cuda", "these cases are to run the kernels: set TRITON_INTERPRET=1"

# Relative and absolute, of what is computed in fp32 from the same inputs and stored in the type. Half a unit in the
# last place is 2^-11 (fp16) and 2^-8 (bf16); the interpreter cuts bf16 off instead of rounding: a whole unit.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = tuple(TOLERANCE)
SIZES = (0, 1, 2047, 2049)  # around the tile of 2048 elements


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The same numbers on every device; never NaN or infinite."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def segments(*shape: int, modalities: int, seed: int = 0) -> Tensor:
    """Modalities, and numbers just below and above them, which stand for padding."""
    drawn = torch.randint(-1, modalities + 1, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(DEVICE)


def every_second_column(x: Tensor) -> Tensor:
    """The same numbers, with no stride of 1."""
    return torch.stack([x, x + 1], -1).flatten(-2)[..., ::2]


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def close(
    found: Iterable[Tensor | None], expected: Iterable[Tensor | None], dtype: torch.dtype, scale: float = 1
) -> None:
    """`scale`: how much larger than 1 the numbers are that were added up to what is compared."""
    for mine, reference in zip(found, expected, strict=True):
        assert mine is not None and reference is not None
        rtol = TOLERANCE[dtype]
        torch.testing.assert_close(mine, reference, rtol=rtol, atol=rtol * scale, equal_nan=True)


def same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """To the bit, NaN where NaN is expected."""
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=0, equal_nan=True)
