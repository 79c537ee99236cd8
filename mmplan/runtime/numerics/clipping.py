"""Gradient clipping with a threshold per modality.

Two articles on multimodal training give thresholds of 1.0 and 0.8 for vision, 0.5 and 1.2 for language: they are no
constants of nature, so none is built in.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mmplan.runtime.numerics.global_norm import GradientNorms, norms_of
from mmplan.runtime.numerics.sharing import HeldGradient, Sharing


def clip_gradients_(sharing: Sharing, thresholds: Mapping[str, float], *, total: float | None = None) -> GradientNorms:
    """Scale the gradients of each part in `thresholds` down to that norm, then all of them to the norm `total`.

    Norms that are no numbers clip nothing: who scales losses sees them and leaves the step out. Collective; the host
    does not wait for the device.

    Returns:
        The norms before.

    Raises:
        ValueError: a threshold is not above 0, or of a part that does not exist.
    """
    for part, threshold in (*thresholds.items(), *([] if total is None else [("total", total)])):
        if part not in (*sharing.parts, "total") or (part == "total" and total is None):
            raise ValueError(f"a threshold for '{part}': there are {', '.join(sharing.parts)}")
        if not threshold > 0:
            raise ValueError(f"threshold {threshold} of '{part}' is not above 0")
    gradients = sharing.gradients()
    norms = norms_of(sharing, gradients)
    scale_down_(gradients, norms, thresholds, total)
    return norms


def scale_down_(
    gradients: Iterable[HeldGradient], norms: GradientNorms, thresholds: Mapping[str, float], total: float | None = None
) -> None:
    """Clip gradients whose norms are known."""
    factors = {part: _factor(norms.of[part], threshold) for part, threshold in thresholds.items()}
    if total is not None:
        one = torch.ones_like(norms.total)
        left = torch.stack([norm * factors.get(part, one) for part, norm in norms.of.items()]).square().sum().sqrt()
        factors = {part: factors.get(part, one) * _factor(left, total) for part in norms.of}
    for gradient in gradients:
        if gradient.part in factors:
            gradient.stored.mul_(factors[gradient.part].to(gradient.stored.device))


def _factor(norm: Tensor, threshold: float) -> Tensor:
    return torch.where((norm > threshold) & norm.isfinite(), threshold / norm, torch.ones_like(norm))
