"""Rows taken from and put at positions, with gradients; positions outside are padding."""

import pytest
import torch
from kernel_inputs import DEVICE, DTYPES, close, every_second_column, leaves, random, same

from mmplan.kernels.ragged import (
    ragged_gather,
    ragged_gather_reference,
    ragged_positions,
    ragged_scatter,
    ragged_scatter_reference,
)

WIDTHS = (0, 1, 7, 2047, 2049)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", WIDTHS)
def test_a_gather_and_its_gradient(d: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([3, -1, 9, 8, 0, 3, 100], device=DEVICE)  # 3 twice: gradients add; 9 rows: 9 is outside
    (mine,), (reference,) = leaves(random(9, d, dtype=dtype)), leaves(random(9, d, dtype=dtype))
    y, expected = ragged_gather(mine, positions), ragged_gather_reference(reference, positions)
    same([y], [expected])
    gradient = random(7, d, dtype=dtype, seed=1)
    y.backward(gradient)
    expected.backward(gradient)
    close([mine.grad], [reference.grad], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", WIDTHS)
def test_a_scatter_and_its_gradients(d: int, dtype: torch.dtype) -> None:
    places = [torch.tensor(p, dtype=torch.int64, device=DEVICE) for p in ([2, -1, 7, 11, 1], [], [3, 0, 20])]
    parts = [random(len(p), d, dtype=dtype, seed=i) for i, p in enumerate(places)]
    mine, reference = leaves(*parts), leaves(*parts)
    y, expected = ragged_scatter(mine, places, 12), ragged_scatter_reference(reference, places, 12)
    same([y], [expected])
    gradient = random(12, d, dtype=dtype, seed=9)
    y.backward(gradient)
    expected.backward(gradient)
    same([part.grad for part in mine], [part.grad for part in reference])


def test_a_padded_batch_is_packed_and_padded_again() -> None:
    batch, lengths = random(3, 5, 4, 2), torch.tensor([2, 0, 5], device=DEVICE)
    positions = ragged_positions(lengths, 5)
    packed = ragged_gather(batch.flatten(0, 1), positions)
    same([packed], [torch.cat([batch[0, :2], batch[2]])])
    again = ragged_scatter([packed], [positions], 15).view(3, 5, 4, 2)
    real = (torch.arange(5, device=DEVICE) < lengths[:, None])[..., None, None]
    same([again], [batch * real])


def test_any_strides_and_narrow_integers() -> None:
    x, positions = every_second_column(random(6, 9)), torch.tensor([1, 5, -1], dtype=torch.int32, device=DEVICE)
    for given in (x, x.T):
        same([ragged_gather(given, positions)], [ragged_gather_reference(given, positions.long())])
    same([ragged_scatter([x.T[:3]], [positions], 7)], [ragged_scatter_reference([x.T[:3]], [positions], 7)])
    same([ragged_gather(torch.arange(5, device=DEVICE), positions)], [torch.tensor([1, 0, 0], device=DEVICE)])
