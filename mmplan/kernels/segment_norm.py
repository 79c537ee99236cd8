"""LayerNorm and RMSNorm of a mixed sequence in one launch: each token by its own statistics, with the parameters of its
modality. `segment_normalize` takes statistics that are given instead: pooled over a modality, or summed over ranks
(segment_moments.py)."""

from typing import Any, no_type_check

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmplan.kernels.dispatch import jit, launch, persistent_programs, tl, uses_triton

_TILE = 1024  # elements a program normalises at once where rows are short
_WIDEST = 16384  # elements of a row that registers hold; wider ones take the reference


@jit
@no_type_check
def _forward_kernel(
    x_ptr,
    segment_ptr,
    weights_ptr,
    biases_ptr,
    mean_ptr,
    inverse_std_ptr,
    y_ptr,
    rows,
    d,
    modalities,
    x_stride,
    weights_stride,
    weights_step,
    biases_stride,
    biases_step,
    eps,
    KIND: tl.constexpr,
    PER_MODALITY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """KIND "layer" and "rms" compute the statistics and keep them for the backward; "given" reads them."""
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    segment = tl.load(segment_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    real = (segment >= 0) & (segment < modalities) & (row < rows)
    inside = real & (column < d)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == "given":
        index = segment if PER_MODALITY else row
        mean = tl.load(mean_ptr + index, mask=real, other=0.0)
        inverse_std = tl.load(inverse_std_ptr + index, mask=real, other=0.0)
        centred = x - mean
    else:
        mean = tl.sum(x, 1, keep_dims=True) / d if KIND == "layer" else tl.zeros((HEIGHT, 1), tl.float32)
        centred = tl.where(inside, x - mean, 0.0)
        inverse_std = 1.0 / tl.sqrt(tl.sum(centred * centred, 1, keep_dims=True) / d + eps)
        tl.store(mean_ptr + row, mean, mask=row < rows)
        tl.store(inverse_std_ptr + row, inverse_std, mask=row < rows)
    weight = tl.load(weights_ptr + segment * weights_stride + column * weights_step, mask=inside, other=0.0)
    y = centred * inverse_std * weight.to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(biases_ptr + segment * biases_stride + column * biases_step, mask=inside, other=0.0)
        y += bias.to(tl.float32)
    tl.store(y_ptr + row * d + column, tl.where(real, y, 0.0), mask=(row < rows) & (column < d))


@jit
@no_type_check
def _backward_kernel(
    dy_ptr,
    x_ptr,
    segment_ptr,
    weights_ptr,
    mean_ptr,
    inverse_std_ptr,
    dx_ptr,
    partial_weights_ptr,
    partial_biases_ptr,
    dmean_ptr,
    dinverse_std_ptr,
    rows,
    d,
    modalities,
    x_stride,
    weights_stride,
    weights_step,
    KIND: tl.constexpr,
    PER_MODALITY: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program (p, m) takes every P-th row and of those the ones of modality m, so that gradients of parameters stay in
    registers: one partial sum per program, added up afterwards in a fixed order. Modality 0 takes padding too."""
    modality = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    inside = column < d
    weight = tl.load(weights_ptr + modality * weights_stride + column * weights_step, mask=inside, other=0.0)
    weight = weight.to(tl.float32)
    weights_gradient = tl.zeros((WIDTH,), tl.float32)
    biases_gradient = tl.zeros((WIDTH,), tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        segment = tl.load(segment_ptr + row).to(tl.int64)
        if segment == modality:
            index = segment if PER_MODALITY else row
            mean = tl.load(mean_ptr + index)
            inverse_std = tl.load(inverse_std_ptr + index)
            x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + row * d + column, mask=inside, other=0.0).to(tl.float32)
            normal = tl.where(inside, (x - mean) * inverse_std, 0.0)
            g = dy * weight
            weights_gradient += dy * normal
            biases_gradient += dy
            if KIND == "given":
                dx = g * inverse_std
                tl.store(dmean_ptr + row, -inverse_std * tl.sum(g, 0))
                tl.store(dinverse_std_ptr + row, tl.sum(tl.where(inside, g * (x - mean), 0.0), 0))
            elif KIND == "layer":
                dx = (g - normal * (tl.sum(g * normal, 0) / d) - tl.sum(g, 0) / d) * inverse_std
            else:
                dx = (g - normal * (tl.sum(g * normal, 0) / d)) * inverse_std
            tl.store(dx_ptr + row * d + column, dx, mask=inside)
        elif (modality == 0) & ((segment < 0) | (segment >= modalities)):
            tl.store(dx_ptr + row * d + column, tl.zeros((WIDTH,), tl.float32), mask=inside)
    place = (tl.program_id(0) * modalities + modality).to(tl.int64) * d + column
    tl.store(partial_weights_ptr + place, weights_gradient, mask=inside)
    tl.store(partial_biases_ptr + place, biases_gradient, mask=inside)


def segment_layer_norm(
    x: Tensor, segment: Tensor, weights: Tensor, biases: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weights[m] + biases[m] for a token of modality m; x's shape and dtype.

    x [..., d]; `segment` [...] holds a modality 0..M-1 per token, and anything else stands for padding, which gives
    zeros and no gradient; weights and biases [M, d]. Differentiable in x, weights and biases.
    """
    _check(x, segment, weights, biases)
    if not _has_kernel_for(x, segment, weights):
        return segment_layer_norm_reference(x, segment, weights, biases, eps)
    return _normalized(x, segment, weights, biases, None, None, eps, "layer")


def segment_rms_norm(x: Tensor, segment: Tensor, weights: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weights[m]; shapes as of `segment_layer_norm`."""
    _check(x, segment, weights, None)
    if not _has_kernel_for(x, segment, weights):
        return segment_rms_norm_reference(x, segment, weights, eps)
    return _normalized(x, segment, weights, None, None, None, eps, "rms")


def segment_normalize(
    x: Tensor, segment: Tensor, mean: Tensor, inverse_std: Tensor, weights: Tensor, biases: Tensor | None = None
) -> Tensor:
    """(x - mean) * inverse_std * weights[m] + biases[m], with statistics per modality [M] or per token [..., 1].

    x [..., d], `segment` [...], weights and biases [M, d] (under TP: this rank's d) as in `segment_layer_norm`; for
    RMSNorm give a mean of zeros. Differentiable in everything but the segment.
    """
    _check(x, segment, weights, biases)
    if mean.shape != inverse_std.shape or mean.shape not in ((*segment.shape, 1), weights.shape[:1]):
        wanted = f"per modality {tuple(weights.shape[:1])} or per token {(*segment.shape, 1)}"
        raise ValueError(f"mean {tuple(mean.shape)}, inverse_std {tuple(inverse_std.shape)}: {wanted} wanted")
    if not _has_kernel_for(x, segment, weights):
        return segment_normalize_reference(x, segment, mean, inverse_std, weights, biases)
    return _normalized(x, segment, weights, biases, mean, inverse_std, 0.0, "given")


def segment_layer_norm_reference(
    x: Tensor, segment: Tensor, weights: Tensor, biases: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    y = torch.nn.functional.layer_norm(_tokens(x, segment, weights), x.shape[-1:], eps=eps)
    return _with_parameters(y, segment, weights, biases).to(x.dtype)


def segment_rms_norm_reference(x: Tensor, segment: Tensor, weights: Tensor, eps: float = 1e-6) -> Tensor:
    tokens = _tokens(x, segment, weights)
    y = tokens * torch.rsqrt(tokens.square().mean(-1, keepdim=True) + eps)
    return _with_parameters(y, segment, weights, None).to(x.dtype)


def segment_normalize_reference(
    x: Tensor, segment: Tensor, mean: Tensor, inverse_std: Tensor, weights: Tensor, biases: Tensor | None = None
) -> Tensor:
    if mean.shape != (*segment.shape, 1):
        index = torch.where((segment >= 0) & (segment < len(weights)), segment, 0).long()[..., None]
        mean, inverse_std = mean[index], inverse_std[index]
    y = (_tokens(x, segment, weights) - mean) * inverse_std
    return _with_parameters(y, segment, weights, biases).to(x.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        segment: Tensor,
        weights: Tensor,
        biases: Tensor | None,
        mean: Tensor | None,
        inverse_std: Tensor | None,
        eps: float,
        kind: str,
        per_modality: bool,
    ) -> Tensor:
        rows, d = x.shape
        if mean is None or inverse_std is None:
            mean, inverse_std = torch.empty(2, rows, device=x.device)
        else:
            mean, inverse_std = mean.float().contiguous(), inverse_std.float().contiguous()
        y, width = x.new_empty(rows, d), 1 << (d - 1).bit_length()
        height = max(1, _TILE // width)
        beside = weights if biases is None else biases
        launch(
            *(_forward_kernel, (-(-rows // height),)),
            *(x, segment, weights, beside, mean, inverse_std, y, rows, d, len(weights)),
            *(x.stride(0), *weights.stride(), *beside.stride(), eps),
            *(kind, per_modality, biases is not None, height, width),
            num_warps=_warps(width),
        )
        ctx.save_for_backward(x, segment, weights, mean, inverse_std)
        ctx.kind, ctx.per_modality, ctx.bias_dtype = kind, per_modality, None if biases is None else biases.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, segment, weights, mean, inverse_std = ctx.saved_tensors
        (rows, d), modalities, given = x.shape, len(weights), ctx.kind == "given"
        dx, width = x.new_empty(rows, d), 1 << (d - 1).bit_length()
        programs = max(1, persistent_programs(x.device, rows) // modalities)
        partial = torch.empty(2, programs, modalities, d, device=x.device)
        of_rows = torch.zeros(2, rows if given else 0, device=x.device)
        launch(
            *(_backward_kernel, (programs, modalities)),
            *(dy.contiguous(), x, segment, weights, mean, inverse_std, dx, *partial, *of_rows),
            *(rows, d, modalities, x.stride(0), *weights.stride()),
            *(ctx.kind, ctx.per_modality, width),
            num_warps=_warps(width),
        )
        dweights, dbiases = partial.sum(1)
        dmean, dinverse_std = _per_modality(of_rows, segment, modalities) if ctx.per_modality else of_rows
        return (
            *(dx, None, dweights.to(weights.dtype), None if ctx.bias_dtype is None else dbiases.to(ctx.bias_dtype)),
            *((dmean, dinverse_std) if given else (None, None)),
            *(None, None, None),
        )


def _per_modality(of_rows: Tensor, segment: Tensor, modalities: int) -> Tensor:
    """Sums [2, modalities] of numbers per row [2, rows], in a fixed order."""
    chosen = segment == torch.arange(modalities, device=segment.device)[:, None]
    return torch.where(chosen, of_rows[:, None], 0.0).sum(2)


def _normalized(
    x: Tensor,
    segment: Tensor,
    weights: Tensor,
    biases: Tensor | None,
    mean: Tensor | None,
    inverse_std: Tensor | None,
    eps: float,
    kind: str,
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    segment_of_row = segment.reshape(-1).contiguous()
    per_modality = mean is not None and mean.shape != (*segment.shape, 1)
    if mean is not None and inverse_std is not None:
        mean, inverse_std = mean.reshape(-1), inverse_std.reshape(-1)
    arguments = (rows, segment_of_row, weights, biases, mean, inverse_std, eps, kind, per_modality)
    y: Tensor = _Norm.apply(*arguments)  # type: ignore[no-untyped-call]
    return y.view(x.shape)


def _has_kernel_for(x: Tensor, segment: Tensor, weights: Tensor) -> bool:
    return uses_triton(x, segment, weights) and x.numel() > 0 and x.shape[-1] <= _WIDEST


def _warps(width: int) -> int:
    return min(16, max(4, width // 512))


def _tokens(x: Tensor, segment: Tensor, weights: Tensor) -> Tensor:
    """In fp32, padding zeroed: whatever it holds, no gradient comes from it."""
    return torch.where(((segment >= 0) & (segment < len(weights)))[..., None], x.float(), 0.0)


def _with_parameters(y: Tensor, segment: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
    real = ((segment >= 0) & (segment < len(weights)))[..., None]
    index = torch.where(real[..., 0], segment, 0).long()
    y = y * weights[index].float()
    return torch.where(real, y if biases is None else y + biases[index].float(), 0.0)


def _check(x: Tensor, segment: Tensor, weights: Tensor, biases: Tensor | None) -> None:
    if segment.shape != x.shape[:-1] or segment.is_floating_point():
        raise ValueError(f"segment {tuple(segment.shape)} of {segment.dtype} of tokens {tuple(x.shape)}")
    if weights.dim() != 2 or len(weights) == 0 or weights.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weights {tuple(weights.shape)} of tokens {tuple(x.shape)}: [modalities, {x.shape[-1]}] wanted"
        )
    if biases is not None and biases.shape != weights.shape:
        raise ValueError(f"biases {tuple(biases.shape)} beside weights {tuple(weights.shape)}")
