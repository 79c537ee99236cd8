"""Rows of tokens taken from or put at positions: how modalities of ragged lengths merge into one sequence and leave it.

A position outside the range stands for padding: it is read as zeros and never written.
"""

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmplan.kernels.dispatch import jit, launch, tl, uses_triton
from mmplan.kernels.tuning import tile_of


@jit
@no_type_check
def _gather_kernel(x_ptr, positions_ptr, y_ptr, n, t, d, x_stride, y_stride, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """y[i] = x[positions[i]], zeros where that is outside 0..n-1. Numbers are copied, so nothing is cast."""
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    position = tl.load(positions_ptr + row, mask=row < t, other=-1).to(tl.int64)[:, None]
    inside = (position >= 0) & (position < n) & (column < d)
    x = tl.load(x_ptr + position * x_stride + column, mask=inside, other=0.0)
    tl.store(y_ptr + row[:, None] * y_stride + column, x, mask=(row < t)[:, None] & (column < d))


@jit
@no_type_check
def _scatter_kernel(
    x_ptr,
    positions_ptr,
    y_ptr,
    n,
    t,
    d,
    x_stride,
    y_stride,
    ADD: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """y[positions[i]] = x[i], or added to it in fp32, where that is inside 0..n-1."""
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    position = tl.load(positions_ptr + row, mask=row < t, other=-1).to(tl.int64)[:, None]
    inside = (position >= 0) & (position < n) & (column < d)
    x = tl.load(x_ptr + row[:, None] * x_stride + column, mask=inside, other=0.0)
    if ADD:
        tl.atomic_add(y_ptr + position * y_stride + column, x.to(tl.float32), mask=inside)
    else:
        tl.store(y_ptr + position * y_stride + column, x, mask=inside)


def ragged_gather(x: Tensor, positions: Tensor) -> Tensor:
    """Rows of x [n, ...] at integer `positions` [t]: [t, ...]; zeros where a position is outside 0..n-1.

    Differentiable in x; positions may repeat (their gradients add up).
    """
    _check_positions(positions, "x", x.shape)
    if not uses_triton(x, positions) or x.numel() == 0 or positions.numel() == 0:
        return ragged_gather_reference(x, positions)
    y: Tensor = _Gather.apply(x.flatten(1) if x.dim() > 1 else x[:, None], positions)  # type: ignore[no-untyped-call]
    return y.view(len(positions), *x.shape[1:])


def ragged_scatter(parts: Sequence[Tensor], positions: Sequence[Tensor], length: int) -> Tensor:
    """A sequence [length, ...] that has row i of parts[m] at positions[m][i], and zeros where nothing is put.

    Parts [n_m, ...] have the same dtype, device and trailing shape; positions [n_m] are distinct over all parts (two
    rows at one place: which of them stays is not said); one outside 0..length-1 is padding. Differentiable.
    """
    _check(parts, positions)
    if not uses_triton(*parts, *positions) or length == 0 or parts[0][:1].numel() == 0:
        return ragged_scatter_reference(parts, positions, length)
    rows = [part.flatten(1) if part.dim() > 1 else part[:, None] for part in parts]
    y: Tensor = _Scatter.apply(length, *positions, *rows)  # type: ignore[no-untyped-call]
    return y.view(length, *parts[0].shape[1:])


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
    rows, places = torch.cat(list(parts)), torch.cat(list(positions)).long()
    inside = (places >= 0) & (places < length)
    return rows.new_zeros(length, *rows.shape[1:]).index_copy(0, places[inside], rows[inside])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return _launch_gather(x, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (positions,) = ctx.saved_tensors
        dx = torch.zeros(ctx.shape, device=dy.device)
        _launch_scatter(dy, positions, dx, add=True)
        return dx.to(ctx.dtype), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, length: int, *positions_and_parts: Tensor) -> Tensor:
        half = len(positions_and_parts) // 2
        positions, parts = positions_and_parts[:half], positions_and_parts[half:]
        ctx.save_for_backward(*positions)
        y = parts[0].new_zeros(length, parts[0].shape[1])
        for part, places in zip(parts, positions, strict=True):
            _launch_scatter(part, places, y, add=False)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[None] * len(ctx.saved_tensors), *[_launch_gather(dy, places) for places in ctx.saved_tensors]


def _launch_gather(x: Tensor, positions: Tensor) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    y = x.new_empty(len(positions), x.shape[1])
    if y.numel():
        grid, height, width, warps = _tiles(y)
        arguments = (*x.shape[:1], *y.shape, x.stride(0), y.stride(0), height, width)
        launch(_gather_kernel, grid, x, positions.contiguous(), y, *arguments, num_warps=warps)
    return y


def _launch_scatter(x: Tensor, positions: Tensor, y: Tensor, *, add: bool) -> None:
    x = x if x.stride(1) == 1 else x.contiguous()
    if x.numel():
        grid, height, width, warps = _tiles(x)
        arguments = (*y.shape[:1], *x.shape, x.stride(0), y.stride(0), add, height, width)
        launch(_scatter_kernel, grid, x, positions.contiguous(), y, *arguments, num_warps=warps)


def _tiles(copied: Tensor) -> tuple[tuple[int, int], int, int, int]:
    (rows, columns), tile = copied.shape, tile_of("ragged", copied.device)
    width = min(tile.elements, 1 << (columns - 1).bit_length())
    height = tile.elements // width
    return (-(-rows // height), -(-columns // width)), height, width, tile.warps


def _check(parts: Sequence[Tensor], positions: Sequence[Tensor]) -> None:
    if not parts or len(parts) != len(positions):
        raise ValueError(f"{len(parts)} parts with {len(positions)} lists of positions")
    for part, places in zip(parts, positions, strict=True):
        _check_positions(places, "a part", part.shape)
        if places.shape != part.shape[:1]:
            raise ValueError(f"positions {tuple(places.shape)} of a part {tuple(part.shape)}")
        if part.shape[1:] != parts[0].shape[1:] or part.dtype != parts[0].dtype:
            described = [f"{tuple(item.shape)} of {item.dtype}" for item in (parts[0], part)]
            raise ValueError(f"parts {described[0]} and {described[1]} are rows of different kinds")


def _check_positions(positions: Tensor, what: str, shape: torch.Size) -> None:
    if positions.dim() != 1 or positions.is_floating_point() or positions.dtype == torch.bool:
        given = f"positions {tuple(positions.shape)} of {positions.dtype}"
        raise ValueError(f"{given} of {what} {tuple(shape)}: one integer per row wanted")
