"""Rows of tokens taken from or put at positions: how modalities of ragged lengths merge into one sequence and leave it.

A position outside the range stands for padding: it is read as zeros and never written.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def ragged_gather(x: Tensor, positions: Tensor) -> Tensor:
    """Rows of x [n, ...] at integer `positions` [t]: [t, ...]; zeros where a position is outside 0..n-1.

    Differentiable in x; positions may repeat (their gradients add up).
    """
    return ragged_gather_reference(x, positions)


def ragged_scatter(parts: Sequence[Tensor], positions: Sequence[Tensor], length: int) -> Tensor:
    """A sequence [length, ...] that has row i of parts[m] at positions[m][i], and zeros where nothing is put.

    Parts [n_m, ...] have the same dtype, device and trailing shape; positions [n_m] are distinct over all parts (two
    rows at one place: which of them stays is not said); one outside 0..length-1 is padding. Differentiable.
    """
    _check(parts, positions)
    return ragged_scatter_reference(parts, positions, length)


def ragged_positions(lengths: Tensor, width: int) -> Tensor:
    """Flat positions of the real tokens in a padded batch [len(lengths), width]: int64 [sum(lengths)], in order.

    `ragged_gather(batch.flatten(0, 1), ragged_positions(lengths, width))` packs it, `ragged_scatter` pads it again.
    """
    if lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= width:
        raise ValueError(f"lengths {lengths.tolist()} of a batch padded to {width}")
    return (torch.arange(width, device=lengths.device) < lengths[:, None]).flatten().nonzero().flatten()


def ragged_gather_reference(x: Tensor, positions: Tensor) -> Tensor:
    inside = (positions >= 0) & (positions < len(x))
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return padded.index_select(0, torch.where(inside, positions, len(x)))


def ragged_scatter_reference(parts: Sequence[Tensor], positions: Sequence[Tensor], length: int) -> Tensor:
    _check(parts, positions)
    rows, places = torch.cat(list(parts)), torch.cat(list(positions))
    inside = (places >= 0) & (places < length)
    return rows.new_zeros(length, *rows.shape[1:]).index_copy(0, places[inside], rows[inside])


def _check(parts: Sequence[Tensor], positions: Sequence[Tensor]) -> None:
    if not parts or len(parts) != len(positions):
        raise ValueError(f"{len(parts)} parts with {len(positions)} lists of positions")
    for part, places in zip(parts, positions, strict=True):
        if places.shape != part.shape[:1]:
            raise ValueError(f"positions {tuple(places.shape)} of a part {tuple(part.shape)}")
