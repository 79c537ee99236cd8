"""Top-k by threshold: the same elements as a sort, exactly k, ties by index."""

import pytest
import torch
from kernel_inputs import DEVICE, DTYPES, every_second_column, random, same

from mmplan.kernels.top_k import top_k, top_k_reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2047, 2049, 5000])
def test_the_elements_are_those_of_a_sort(n: int, dtype: torch.dtype) -> None:
    x = random(n, dtype=dtype)
    for k in {0, 1, n // 20, n}:
        same(top_k(x, k), top_k_reference(x, k))


def test_of_equal_elements_the_first_are_taken() -> None:
    x = torch.tensor([1.0, -2.0, 2.0, 0.0, 2.0, -2.0, 0.0], device=DEVICE).repeat(700)
    for k in (1, 3, 2800, 2801, 3500, 4900):  # 2,800 twos, 700 ones, 1,400 zeros
        same(top_k(x, k), top_k_reference(x, k))
    assert top_k(x, 3).indices.tolist() == [1, 2, 4]


def test_what_is_not_a_number_is_sent_first_and_subnormal_numbers_are_not_zero() -> None:
    x = torch.zeros(40, device=DEVICE)
    x[[5, 11, 20, 30]] = torch.tensor([1e-44, float("nan"), -float("inf"), 3.0], device=DEVICE)
    assert top_k(x, 3).indices.tolist() == [11, 20, 30]
    assert top_k(x, 4).indices.tolist() == [5, 11, 20, 30]


def test_indices_count_along_the_flattened_tensor() -> None:
    x = every_second_column(random(7, 30)).T
    same(top_k(x, 20), top_k_reference(x, 20))
    assert torch.equal(x.flatten()[top_k(x, 20).indices], top_k(x, 20).values)
