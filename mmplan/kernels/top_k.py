"""The k elements of largest magnitude, found by their threshold (radix select on the bits of |x|), never by a sort."""

from typing import NamedTuple, no_type_check

import torch
from torch import Tensor

from mmplan.kernels.dispatch import jit, launch, persistent_programs, tl, uses_triton
from mmplan.kernels.tuning import tile_of

_SHIFTS = (23, 15, 7, 0)  # where the digits of a 31-bit key begin: three of 8 bits, the last of 7
_DIGITS = 256  # that a digit can be


class TopK(NamedTuple):
    """`values` [k] in x's dtype and `indices` [k] int64 into the flattened x, ascending."""

    values: Tensor
    indices: Tensor


@jit
@no_type_check
def _keys(x_ptr, offset, n):
    """Integers in the order of |x|, as `_magnitude_bits`; -1 past the end."""
    x = tl.load(x_ptr + offset, mask=offset < n, other=0.0)
    return x, tl.where(offset < n, x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)


@jit
@no_type_check
def _histogram_kernel(x_ptr, state_ptr, counts_ptr, n, tiles, bits, shift, TILE: tl.constexpr, DIGITS: tl.constexpr):
    """How often each digit follows the prefix that is known (state[0])."""
    prefix = tl.load(state_ptr).to(tl.int32)
    counts = tl.zeros((2 * DIGITS,), tl.int32)  # the upper half takes what does not begin with the prefix
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        _, key = _keys(x_ptr, tile * TILE + tl.arange(0, TILE), n)
        known = (key >= 0) & ((key >> shift >> bits) == prefix)
        counts += tl.histogram(tl.where(known, (key >> shift) & ((1 << bits) - 1), DIGITS), 2 * DIGITS)
    digit = tl.arange(0, 2 * DIGITS)
    tl.atomic_add(counts_ptr + digit, counts.to(tl.int64), mask=(digit < DIGITS) & (counts > 0))


@jit
@no_type_check
def _digit_kernel(state_ptr, counts_ptr, bits, DIGITS: tl.constexpr):
    """The digit of the k-th largest: fewer than k are above it. Appends it to the prefix, takes those above off k
    (state[1]) and clears the counts for the next digit."""
    digit = tl.arange(0, DIGITS)
    counts, k = tl.load(counts_ptr + digit), tl.load(state_ptr + 1)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    found = (above < k) & (k <= above + counts)
    prefix = (tl.load(state_ptr) << bits) + tl.sum(tl.where(found, digit, 0), 0)
    tl.store(state_ptr, prefix)
    tl.store(state_ptr + 1, k - tl.sum(tl.where(found, above, 0), 0))
    tl.store(counts_ptr + digit, tl.zeros((DIGITS,), tl.int64))


@jit
@no_type_check
def _count_kernel(x_ptr, state_ptr, larger_ptr, equal_ptr, n, TILE: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    _, key = _keys(x_ptr, tile * TILE + tl.arange(0, TILE), n)
    threshold = tl.load(state_ptr).to(tl.int32)
    tl.store(larger_ptr + tile, tl.sum((key > threshold).to(tl.int32), 0).to(tl.int64))
    tl.store(equal_ptr + tile, tl.sum((key == threshold).to(tl.int32), 0).to(tl.int64))


@jit
@no_type_check
def _compact_kernel(x_ptr, state_ptr, larger_ptr, equal_ptr, values_ptr, indices_ptr, n, TILE: tl.constexpr):
    """Writes what is above the threshold and the first state[1] of those equal to it, each at the number of such
    elements before it."""
    tile = tl.program_id(0).to(tl.int64)
    offset = tile * TILE + tl.arange(0, TILE)
    x, key = _keys(x_ptr, offset, n)
    threshold, wanted = tl.load(state_ptr).to(tl.int32), tl.load(state_ptr + 1)
    larger, equal = (key > threshold).to(tl.int32), (key == threshold).to(tl.int32)
    larger_before = tl.load(larger_ptr + tile) + tl.cumsum(larger, 0) - larger
    equal_before = tl.load(equal_ptr + tile) + tl.cumsum(equal, 0) - equal
    place = larger_before + tl.minimum(equal_before, wanted)
    chosen = (larger > 0) | ((equal > 0) & (equal_before < wanted))
    tl.store(values_ptr + place, x, mask=chosen)
    tl.store(indices_ptr + place, offset, mask=chosen)


def top_k(x: Tensor, k: int) -> TopK:
    """Exactly k elements of largest |x|; of equal ones those of lower index. Compared in fp32; NaN counts as larger
    than infinity: it is sent, not hidden. Raises ValueError unless 0 <= k <= x.numel()."""
    _check(x, k)
    if not uses_triton(x) or k == 0:
        return top_k_reference(x, k)
    flat, device = x.detach().contiguous().flatten(), x.device
    tile = tile_of("top_k", device)
    n, size, warps = flat.numel(), tile.elements, tile.warps
    tiles = -(-n // size)
    state = torch.zeros(2, dtype=torch.int64, device=device)
    state[1].fill_(k)  # a copy from host memory would wait for the device
    counts = torch.zeros(_DIGITS, dtype=torch.int64, device=device)
    for shift in _SHIFTS:
        programs = persistent_programs(device, tiles)
        arguments = (flat, state, counts, n, tiles, _bits(shift), shift, size, _DIGITS)
        launch(_histogram_kernel, (programs,), *arguments, num_warps=warps)
        launch(_digit_kernel, (1,), state, counts, _bits(shift), _DIGITS)
    larger, equal = torch.empty(2, tiles, dtype=torch.int64, device=device)
    launch(_count_kernel, (tiles,), flat, state, larger, equal, n, size, num_warps=warps)
    values, indices = flat.new_empty(k), torch.empty(k, dtype=torch.int64, device=device)
    before = larger.cumsum(0) - larger, equal.cumsum(0) - equal
    launch(_compact_kernel, (tiles,), flat, state, *before, values, indices, n, size, num_warps=warps)
    return TopK(values, indices)


def top_k_reference(x: Tensor, k: int) -> TopK:
    _check(x, k)
    flat = x.detach().flatten()
    if k == 0:
        return TopK(flat[:0], torch.empty(0, dtype=torch.int64, device=flat.device))
    keys = _magnitude_bits(flat)
    threshold = keys.kthvalue(len(keys) - k + 1).values
    chosen = keys > threshold
    chosen[(keys == threshold).nonzero().flatten()[: k - int(chosen.sum())]] = True
    indices = chosen.nonzero().flatten()
    return TopK(flat[indices], indices)


def _bits(shift: int) -> int:
    return 7 if shift == 0 else 8


def _magnitude_bits(x: Tensor) -> Tensor:
    """Integers in the order of |x|: the bits of a positive fp32 number are."""
    return x.float().contiguous().view(torch.int32) & 0x7FFFFFFF


def _check(x: Tensor, k: int) -> None:
    if not 0 <= k <= x.numel():
        raise ValueError(f"k={k} of {x.numel()} elements")
