"""Statistics that ranks add up before they normalise: partial sums per modality or per token.

A norm under tensor or sequence parallelism sees a part of the numbers. It sums what it has (`segment_moments` or
`token_moments`), all-reduces the sums over the group that holds the rest *of the same modality*, turns them into mean
and inverse standard deviation (`statistics`) and applies them (`segment_norm.segment_normalize`). Everything is
differentiable, so that autograd through the all-reduce gives the gradient of the whole.
"""

from typing import Any, no_type_check

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmplan.kernels.dispatch import jit, launch, persistent_programs, tl, uses_triton
from mmplan.kernels.segment_norm import segment_normalize
from mmplan.kernels.tuning import tile_of

_MOST_MODALITIES = 64  # whose sums registers hold


@jit
@no_type_check
def _moments_kernel(
    x_ptr,
    segment_ptr,
    shift_ptr,
    partial_ptr,
    rows,
    d,
    modalities,
    x_stride,
    tiles,
    HAS_SHIFT: tl.constexpr,
    MODALITIES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sums of whole rows first, then each row to its modality; one partial result per program."""
    modality = tl.arange(0, MODALITIES)[None, :]
    counts = tl.zeros((HEIGHT, MODALITIES), tl.float32)
    sums = tl.zeros((HEIGHT, MODALITIES), tl.float32)
    squares = tl.zeros((HEIGHT, MODALITIES), tl.float32)
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        row = tile * HEIGHT + tl.arange(0, HEIGHT)[:, None]
        segment = tl.load(segment_ptr + row, mask=row < rows, other=-1).to(tl.int64)
        real = (segment >= 0) & (segment < modalities) & (row < rows)
        shift = tl.load(shift_ptr + segment, mask=real, other=0.0) if HAS_SHIFT else tl.zeros((HEIGHT, 1), tl.float32)
        row_sums = tl.zeros((HEIGHT, WIDTH), tl.float32)
        row_squares = tl.zeros((HEIGHT, WIDTH), tl.float32)
        for start in range(0, d, WIDTH):
            column = start + tl.arange(0, WIDTH)[None, :]
            inside = real & (column < d)
            x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
            x = tl.where(inside, x - shift, 0.0)
            row_sums += x
            row_squares += x * x
        mine = real & (segment == modality)
        counts += tl.where(mine, d, 0).to(tl.float32)
        sums += tl.where(mine, tl.sum(row_sums, 1, keep_dims=True), 0.0)
        squares += tl.where(mine, tl.sum(row_squares, 1, keep_dims=True), 0.0)
    modality = tl.arange(0, MODALITIES)
    place = partial_ptr + (tl.program_id(0) * modalities + modality) * 3
    tl.store(place, tl.sum(counts, 0), mask=modality < modalities)
    tl.store(place + 1, tl.sum(sums, 0), mask=modality < modalities)
    tl.store(place + 2, tl.sum(squares, 0), mask=modality < modalities)


def segment_moments(x: Tensor, segment: Tensor, n_modalities: int, shift: Tensor | None = None) -> Tensor:
    """Count, sum and sum of squares of the elements of each modality's tokens: fp32 [n_modalities, 3].

    x [..., d], `segment` [...] as in `segment_layer_norm` (padding is counted nowhere). With `shift` [n_modalities] the
    sums are of x - shift[m]: two passes, the second shifted by the first's mean, lose no digits where the mean is
    large against the spread. Sums over ranks add. Differentiable in x. The same bits in each run.
    """
    _check(x, segment, n_modalities, shift)
    given = () if shift is None else (shift,)
    if not uses_triton(x, segment, *given) or x.numel() == 0 or n_modalities > _MOST_MODALITIES:
        return segment_moments_reference(x, segment, n_modalities, shift)
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    shift = torch.zeros(n_modalities, device=x.device) if shift is None else shift.detach().float().contiguous()
    moments: Tensor = _Moments.apply(rows, segment.reshape(-1).contiguous(), shift, bool(given))  # type: ignore[no-untyped-call]
    return moments


def token_moments(x: Tensor) -> Tensor:
    """Count, sum and sum of squares of each token's own elements: fp32 [..., 1, 3] of x [..., d] (this rank's part)."""
    x = x.float()
    total, squares = x.sum(-1, keepdim=True), x.square().sum(-1, keepdim=True)
    return torch.stack([torch.full_like(total, x.shape[-1]), total, squares], -1)


def statistics(moments: Tensor, eps: float = 1e-5, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and 1/sqrt(var + eps) [...] of moments [..., 3]; of nothing counted: 0 and 1/sqrt(eps)."""
    count, total, squares = moments.unbind(-1)
    count = count.clamp(min=1)
    mean = total / count
    inverse_std = torch.rsqrt((squares / count - mean.square()).clamp(min=0) + eps)
    return (mean if shift is None else mean + shift), inverse_std


def segment_moments_reference(x: Tensor, segment: Tensor, n_modalities: int, shift: Tensor | None = None) -> Tensor:
    _check(x, segment, n_modalities, shift)
    of_modality = [x[segment == modality].float() for modality in range(n_modalities)]
    if shift is not None:
        of_modality = [rows - shift[modality] for modality, rows in enumerate(of_modality)]
    counts = torch.tensor([float(rows.numel()) for rows in of_modality], device=x.device)
    sums = [torch.stack([rows.sum(), rows.square().sum()]) for rows in of_modality]
    return torch.cat([counts[:, None], torch.stack(sums)], 1)


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, segment: Tensor, shift: Tensor, shifted: bool) -> Tensor:
        (rows, d), modalities = x.shape, len(shift)
        tile = tile_of("segment_moments", x.device)
        width = min(tile.elements // 4, 1 << (d - 1).bit_length())
        height = tile.elements // width
        tiles = -(-rows // height)
        programs = persistent_programs(x.device, tiles)
        partial = torch.empty(programs, modalities, 3, device=x.device)
        launch(
            *(_moments_kernel, (programs,)),
            *(x, segment, shift, partial, rows, d, modalities, x.stride(0), tiles),
            *(shifted, 1 << (modalities - 1).bit_length(), height, width),
            num_warps=tile.warps,
        )
        ctx.save_for_backward(x, segment, shift)
        return partial.sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dmoments: Tensor) -> tuple[Tensor, None, None, None]:
        """dx = (x - shift) * 2 dsquares + dsums, both of the token's modality: a normalisation by other numbers."""
        x, segment, shift = ctx.saved_tensors
        weights, dsums = torch.ones_like(shift)[:, None].expand(-1, x.shape[1]), dmoments[:, 1:2].expand(-1, x.shape[1])
        return segment_normalize(x, segment, shift, 2 * dmoments[:, 2], weights, dsums), None, None, None


def _check(x: Tensor, segment: Tensor, n_modalities: int, shift: Tensor | None) -> None:
    if segment.shape != x.shape[:-1] or segment.is_floating_point():
        raise ValueError(f"segment {tuple(segment.shape)} of {segment.dtype} of tokens {tuple(x.shape)}")
    if n_modalities < 1 or (shift is not None and shift.shape != (n_modalities,)):
        raise ValueError(f"shift {None if shift is None else tuple(shift.shape)} of {n_modalities} modalities")
