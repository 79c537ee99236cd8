"""Squared norms of a tensor per modality, every element counted exactly once whatever the mask's alignment."""

from typing import no_type_check

import torch
from torch import Tensor

from mmplan.kernels.dispatch import jit, launch, persistent_programs, tl, uses_triton
from mmplan.kernels.segment_moments import segment_moments
from mmplan.kernels.tuning import tile_of

_MODALITIES = 4  # that one program counts for: each costs an accumulator per element of the tile


@jit
@no_type_check
def _masked_squared_norm_kernel(
    x_ptr,
    segment_ptr,
    partial_ptr,
    n,
    tiles,
    n_modalities,
    IS_MASK: tl.constexpr,
    DETERMINISTIC: tl.constexpr,
    TILE: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """The segment is read at the index of the element. (The kernel reported faulty read it at the lane's: masks[lane],
    the same for every tile, so that whatever lay beyond the first tile was counted by the wrong mask.)"""
    modalities = tl.program_id(1) * COUNTED + tl.arange(0, COUNTED)
    total = tl.zeros((TILE, COUNTED), tl.float32)
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        element = tile * TILE + tl.arange(0, TILE)
        x = tl.load(x_ptr + element, mask=element < n, other=0.0).to(tl.float32)
        segment = tl.load(segment_ptr + element, mask=element < n, other=0)
        if IS_MASK:
            segment = tl.where(segment != 0, 0, -1)
        total += tl.where(segment[:, None] == modalities[None, :], (x * x)[:, None], 0.0)
    sums = tl.sum(total, 0)
    if DETERMINISTIC:
        place = partial_ptr + tl.program_id(0) * n_modalities + modalities
        tl.store(place, sums, mask=modalities < n_modalities)
    else:
        tl.atomic_add(partial_ptr + modalities, sums, mask=modalities < n_modalities)


def masked_squared_norm(x: Tensor, segment: Tensor, n_modalities: int = 1, *, deterministic: bool = False) -> Tensor:
    """Sum of x^2 over the elements of each modality: fp32 [n_modalities].

    `segment` holds a modality 0..n_modalities-1 (or anything else: counted nowhere) per element, or per row: its shape
    is the first dimensions of x. A bool mask means modality 0 where true. `deterministic`: the same bits in each run,
    by a second pass over partial sums instead of atomic additions; rows always are. Not differentiable: it is measured.
    """
    _check(x, segment, n_modalities)
    if not uses_triton(x, segment) or x.numel() == 0:
        return masked_squared_norm_reference(x, segment, n_modalities)
    x, is_mask = x.detach(), segment.dtype == torch.bool
    if segment.dim() < x.dim():  # rows are summed before their modality matters
        of_row = torch.where(segment, 0, -1) if is_mask else segment
        rows = x.reshape(*segment.shape, x.numel() // segment.numel())
        return segment_moments(rows, of_row, n_modalities)[:, 2]
    flat, segment = x.contiguous().flatten(), segment.contiguous().flatten()
    tile, counted = tile_of("masked_norm", x.device), min(_MODALITIES, 1 << (n_modalities - 1).bit_length())
    tiles = -(-flat.numel() // tile.elements)
    grid = (persistent_programs(x.device, tiles), -(-n_modalities // counted))
    partial = torch.zeros(grid[0] if deterministic else 1, n_modalities, device=x.device)
    launch(
        *(_masked_squared_norm_kernel, grid),
        *(flat, segment.view(torch.uint8) if is_mask else segment, partial),
        *(flat.numel(), tiles, n_modalities, is_mask, deterministic, tile.elements, counted),
        num_warps=tile.warps,
    )
    return partial.sum(0)


def masked_squared_norm_reference(x: Tensor, segment: Tensor, n_modalities: int = 1) -> Tensor:
    _check(x, segment, n_modalities)
    segment = torch.where(segment, 0, -1) if segment.dtype == torch.bool else segment
    squares, segment = x.detach().float().square(), segment.reshape(*segment.shape, *[1] * (x.dim() - segment.dim()))
    return torch.stack([torch.where(segment == modality, squares, 0).sum() for modality in range(n_modalities)])


def _check(x: Tensor, segment: Tensor, n_modalities: int) -> None:
    if n_modalities < 1 or (segment.dtype == torch.bool and n_modalities != 1):
        raise ValueError(f"{n_modalities} modalities with a segment of {segment.dtype}: a bool mask has exactly 1")
    if segment.shape != x.shape[: segment.dim()] or segment.is_floating_point():
        raise ValueError(f"segment {tuple(segment.shape)} of {segment.dtype} is no leading part of x {tuple(x.shape)}")
