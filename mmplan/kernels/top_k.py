"""The k elements of largest magnitude, found by their threshold (radix select on the bits of |x|), never by a sort."""

from typing import NamedTuple

import torch
from torch import Tensor


class TopK(NamedTuple):
    """`values` [k] in x's dtype and `indices` [k] int64 into the flattened x, ascending."""

    values: Tensor
    indices: Tensor


def top_k(x: Tensor, k: int) -> TopK:
    """Exactly k elements of largest |x|; of equal ones those of lower index. NaN counts as larger than infinity: it is
    sent, not hidden. Raises ValueError unless 0 <= k <= x.numel()."""
    _check(x, k)
    return top_k_reference(x, k)


def top_k_reference(x: Tensor, k: int) -> TopK:
    _check(x, k)
    flat = x.detach().flatten()
    indices = _magnitude_bits(flat).sort(descending=True, stable=True).indices[:k].sort().values
    return TopK(flat[indices], indices)


def _magnitude_bits(x: Tensor) -> Tensor:
    """Integers in the order of |x|: the bits of a positive fp32 number are."""
    return x.float().contiguous().view(torch.int32) & 0x7FFFFFFF


def _check(x: Tensor, k: int) -> None:
    if not 0 <= k <= x.numel():
        raise ValueError(f"k={k} of {x.numel()} elements")
