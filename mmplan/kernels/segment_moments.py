"""Statistics that ranks add up before they normalise: partial sums per modality or per token (H4).

A norm under tensor or sequence parallelism sees a part of the numbers. It sums what it has (`segment_moments` or
`token_moments`), all-reduces the sums over the group that holds the rest *of the same modality*, turns them into mean
and inverse standard deviation (`statistics`) and applies them (`segment_norm.segment_normalize`). Everything is
differentiable, so that autograd through the all-reduce gives the gradient of the whole.
"""

import torch
from torch import Tensor


def segment_moments(x: Tensor, segment: Tensor, n_modalities: int, shift: Tensor | None = None) -> Tensor:
    """Count, sum and sum of squares of the elements of each modality's tokens: fp32 [n_modalities, 3].

    x [..., d], `segment` [...] as in `segment_layer_norm` (padding is counted nowhere). With `shift` [n_modalities] the
    sums are of x - shift[m]: two passes, the second shifted by the first's mean, lose no digits where the mean is
    large against the spread. Sums over ranks add. Differentiable in x. The same bits in each run.
    """
    _check(x, segment, n_modalities, shift)
    return segment_moments_reference(x, segment, n_modalities, shift)


def token_moments(x: Tensor) -> Tensor:
    """Count, sum and sum of squares of each token's own elements: fp32 [..., 3] of x [..., d] (d: this rank's part)."""
    x = x.float()
    return torch.stack([torch.full_like(x[..., 0], x.shape[-1]), x.sum(-1), x.square().sum(-1)], -1)


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


def _check(x: Tensor, segment: Tensor, n_modalities: int, shift: Tensor | None) -> None:
    if segment.shape != x.shape[:-1]:
        raise ValueError(f"segment {tuple(segment.shape)} of tokens {tuple(x.shape)}")
    if n_modalities < 1 or (shift is not None and shift.shape != (n_modalities,)):
        raise ValueError(f"shift {None if shift is None else tuple(shift.shape)} of {n_modalities} modalities")
