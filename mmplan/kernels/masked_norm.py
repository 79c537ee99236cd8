"""Squared norms of a tensor per modality, every element counted exactly once whatever the mask's alignment (H7)."""

import torch
from torch import Tensor


def masked_squared_norm(x: Tensor, segment: Tensor, n_modalities: int = 1, *, deterministic: bool = False) -> Tensor:
    """Sum of x^2 over the elements of each modality: fp32 [n_modalities].

    `segment` holds a modality 0..n_modalities-1 (or anything else: counted nowhere) per element, or per row: its shape
    is the first dimensions of x. A bool mask means modality 0 where true. `deterministic`: the same bits in each run,
    by a second pass over partial sums instead of atomic additions. Not differentiable: it is measured.
    """
    segment = _segment_of(x, segment, n_modalities)
    return masked_squared_norm_reference(x, segment, n_modalities)


def masked_squared_norm_reference(x: Tensor, segment: Tensor, n_modalities: int = 1) -> Tensor:
    segment = _segment_of(x, segment, n_modalities)
    squares = x.detach().float().square().reshape(segment.numel(), -1).sum(1)
    return torch.stack([squares[segment.flatten() == modality].sum() for modality in range(n_modalities)])


def _segment_of(x: Tensor, segment: Tensor, n_modalities: int) -> Tensor:
    if n_modalities < 1 or (segment.dtype == torch.bool and n_modalities != 1):
        raise ValueError(f"{n_modalities} modalities with a segment of {segment.dtype}: a bool mask has exactly 1")
    if segment.shape != x.shape[: segment.dim()]:
        raise ValueError(f"segment {tuple(segment.shape)} is no leading part of x {tuple(x.shape)}")
    return torch.where(segment, 0, -1) if segment.dtype == torch.bool else segment
