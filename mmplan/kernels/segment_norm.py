"""LayerNorm and RMSNorm of a mixed sequence in one launch: each token by its own statistics, with the parameters of its
modality (H4). `segment_normalize` takes statistics that are given instead: pooled over a modality, or summed over ranks
(segment_moments.py)."""

import torch
from torch import Tensor


def segment_layer_norm(
    x: Tensor, segment: Tensor, weights: Tensor, biases: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weights[m] + biases[m] for a token of modality m; x's shape and dtype.

    x [..., d]; `segment` [...] holds a modality 0..M-1 per token, and anything else stands for padding, which gives
    zeros and no gradient; weights and biases [M, d]. Differentiable in x, weights and biases.
    """
    _check(x, segment, weights, biases)
    return segment_layer_norm_reference(x, segment, weights, biases, eps)


def segment_rms_norm(x: Tensor, segment: Tensor, weights: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weights[m]; shapes as of `segment_layer_norm`."""
    _check(x, segment, weights, None)
    return segment_rms_norm_reference(x, segment, weights, eps)


def segment_normalize(
    x: Tensor, segment: Tensor, mean: Tensor, inverse_std: Tensor, weights: Tensor, biases: Tensor | None = None
) -> Tensor:
    """(x - mean) * inverse_std * weights[m] + biases[m], with statistics per modality [M] or per token [...].

    x [..., d], `segment` [...], weights and biases [M, d] (under TP: this rank's d) as in `segment_layer_norm`; for
    RMSNorm give a mean of zeros. Differentiable in everything but the segment. Statistics of the shape of `segment`
    count as per token.
    """
    _check(x, segment, weights, biases)
    return segment_normalize_reference(x, segment, mean, inverse_std, weights, biases)


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
    if mean.shape != segment.shape:
        index = torch.where((segment >= 0) & (segment < len(weights)), segment, 0).long()
        mean, inverse_std = mean[index], inverse_std[index]
    y = (_tokens(x, segment, weights) - mean[..., None]) * inverse_std[..., None]
    return _with_parameters(y, segment, weights, biases).to(x.dtype)


def _tokens(x: Tensor, segment: Tensor, weights: Tensor) -> Tensor:
    """In fp32, padding zeroed: whatever it holds, no gradient comes from it."""
    return torch.where(((segment >= 0) & (segment < len(weights)))[..., None], x.float(), 0.0)


def _with_parameters(y: Tensor, segment: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
    real = ((segment >= 0) & (segment < len(weights)))[..., None]
    index = torch.where(real[..., 0], segment, 0).long()
    y = y * weights[index].float()
    return torch.where(real, y if biases is None else y + biases[index].float(), 0.0)


def _check(x: Tensor, segment: Tensor, weights: Tensor, biases: Tensor | None) -> None:
    if segment.shape != x.shape[:-1]:
        raise ValueError(f"segment {tuple(segment.shape)} of tokens {tuple(x.shape)}")
    if weights.dim() != 2 or weights.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weights {tuple(weights.shape)} of tokens {tuple(x.shape)}: [modalities, {x.shape[-1]}] wanted"
        )
    if biases is not None and biases.shape != weights.shape:
        raise ValueError(f"biases {tuple(biases.shape)} beside weights {tuple(weights.shape)}")
