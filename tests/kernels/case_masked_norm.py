"""The masked squared norm: every element once, whatever the alignment of the mask."""

import pytest
import torch
from kernel_inputs import DEVICE, DTYPES, SIZES, close, every_second_column, random, segments
from torch import Tensor

from mmplan.kernels.dispatch import jit, launch, tl
from mmplan.kernels.masked_norm import masked_squared_norm, masked_squared_norm_reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_every_element_is_counted_for_its_modality(n: int, dtype: torch.dtype) -> None:
    x, segment = random(n, dtype=dtype), segments(n, modalities=5)
    for deterministic in (False, True):
        found = masked_squared_norm(x, segment, 5, deterministic=deterministic)
        close([found], [masked_squared_norm_reference(x, segment, 5)], torch.float32, scale=n)


def test_rows_have_one_modality_and_inputs_any_strides() -> None:
    x, segment = every_second_column(random(9, 300)), segments(9, modalities=3)
    close(
        [masked_squared_norm(x, segment, 3)], [masked_squared_norm_reference(x, segment, 3)], torch.float32, scale=900
    )
    turned = random(33, 70).T
    close(
        [masked_squared_norm(turned, turned > 0)], [turned.clamp(min=0).square().sum()[None]], torch.float32, scale=900
    )


@pytest.mark.parametrize("start", [0, 1, 31, 127, 2048, 2500])
def test_coverage_is_whole_wherever_a_modality_begins(start: int) -> None:
    """With ones it is a count, exact in fp32."""
    mask = torch.arange(5000, device=DEVICE) >= start
    counted = masked_squared_norm(torch.ones(5000, device=DEVICE), mask)
    assert counted.item() / (5000 - start) == 1.0


@jit
def _mask_by_lane_kernel(x_ptr, mask_ptr, out_ptr, n, TILE: tl.constexpr):
    """The faulty kernel: the mask is read at the lane, not at the element."""
    lane = tl.arange(0, TILE)
    element = tl.program_id(0) * TILE + lane
    x = tl.load(x_ptr + element, mask=element < n, other=0.0)
    mask = tl.load(mask_ptr + lane, mask=lane < n, other=0)
    tl.atomic_add(out_ptr, tl.sum(tl.where(mask != 0, x * x, 0.0), 0))


def _by_lane(x: Tensor, mask: Tensor) -> float:
    out = torch.zeros(1, device=DEVICE)
    launch(_mask_by_lane_kernel, (-(-x.numel() // 256),), x, mask.view(torch.uint8), out, x.numel(), 256)
    return out.item()


def test_a_mask_read_at_the_lane_covers_three_quarters() -> None:
    """Four rows of 320 tokens, the first 197 of each of vision; tiles of 256. The faulty kernel takes 197 of each tile,
    whatever is there: of the 788 vision tokens 611, or 77.5 % (78.3 % are reported of it, without the lengths), and
    374 others with them."""
    element = torch.arange(4 * 320, device=DEVICE)
    mask = element % 320 < 197
    vision, others = mask.float(), 1 - mask.float()
    assert masked_squared_norm(vision, mask).item() == 788 and masked_squared_norm(others, mask).item() == 0
    assert _by_lane(vision, mask) == 611 and _by_lane(others, mask) == 374
    late = element >= 256  # nothing of the first tile: it counts nothing at all
    assert _by_lane(late.float(), late) == 0
    assert masked_squared_norm(late.float(), late).item() == 1024


def test_a_large_number_does_not_hide_the_other_modality() -> None:
    x = torch.tensor([1e19, 1.0, float("nan"), 2.0], device=DEVICE)
    found = masked_squared_norm(x, torch.tensor([0, 1, 2, 1], device=DEVICE), 3)
    assert found[1] == 5.0 and found[2].isnan() and found[0] == torch.tensor(1e19).square()
