"""A clipping threshold that follows the gradients: tau = alpha sqrt(lambda_max) of their covariance.

lambda_max is tracked by power iteration on the gradients as they come, without any matrix (CCIPCA: Weng, Zhang and
Hwang, IEEE PAMI 25(8), 2003): w <- (1 - a) (w + a d (d.w) / |w|) follows C v, with d the gradient less its running
mean, and lambda_max = |w|. It holds two vectors of the gradients' size, and sums three numbers a modality over ranks.

sqrt(lambda_max) is the spread along *one* direction. Where it is spread evenly over D directions, a gradient's norm is
about sqrt(D) times as large, and every step is clipped: the direction stays, the length becomes tau.

A single outlier would raise lambda_max, and so the threshold that is to stop the next one. Gradients therefore enter no
longer than three times the median of the norms before.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mmplan.runtime.numerics.clipping import scale_down_
from mmplan.runtime.numerics.global_norm import GradientNorms, inner, norms_of
from mmplan.runtime.numerics.sharing import HeldGradient, Sharing

ALPHA = 1.2  # of an article, which allows 1.0 to 1.5
_FIRST_STEPS = 20  # gradients that a covariance needs before it sets the threshold
_NORMS = 20  # whose median tells what an outlier is; collected before any gradient enters the covariance
_OUTLIER = 3.0  # of these medians


@dataclass(slots=True)
class _Spectrum:
    """Of one part; tensors by name of the parameter, in fp32."""

    norms: list[float] = field(default_factory=list)
    steps: int = 0  # gradients that entered
    lambda_max: float = 0.0
    mean: dict[str, Tensor] = field(default_factory=dict)
    direction: dict[str, Tensor] = field(default_factory=dict)  # w


class SpectralClipping:
    """Clips each part's gradients to `alpha` sqrt(lambda_max) of that part's earlier gradients.

    Args:
        memory_steps: gradients count by exp(-age / memory_steps).
    """

    def __init__(self, sharing: Sharing, *, alpha: float = ALPHA, memory_steps: int = 100) -> None:
        if not alpha > 0 or memory_steps < 2:
            raise ValueError(f"alpha {alpha} is to be above 0, memory_steps {memory_steps} at least 2")
        self._sharing, self._alpha, self._memory_steps = sharing, alpha, memory_steps
        self._spectra = {part: _Spectrum() for part in sharing.parts}

    def thresholds(self) -> dict[str, float]:
        """By part; while fewer than 40 gradients were seen, three medians of their norms; none before the first."""
        found = {}
        for part, one in self._spectra.items():
            if one.steps >= _FIRST_STEPS and one.lambda_max > 0:
                found[part] = self._alpha * math.sqrt(one.lambda_max)
            elif one.norms:
                found[part] = _OUTLIER * median(one.norms)
        return found

    def clip_(self) -> GradientNorms:
        """Clip by what was known before this step's gradients; these count from then on. Collective.

        Returns:
            The norms before.
        """
        thresholds, gradients = self.thresholds(), self._sharing.gradients()
        norms = norms_of(self._sharing, gradients)
        factors = {part: self._entering(self._spectra[part], norm.item()) for part, norm in norms.of.items()}
        self._observe(gradients, {part: factor for part, factor in factors.items() if factor is not None})
        scale_down_(gradients, norms, thresholds)
        return norms

    def _entering(self, spectrum: _Spectrum, norm: float) -> float | None:
        """What of a gradient of this norm counts; None: nothing, of one that is no number or that was absent."""
        if not 0 < norm < math.inf:
            return None
        known = len(spectrum.norms) == _NORMS
        usual = median(spectrum.norms) if known else 0.0
        spectrum.norms = [*spectrum.norms, norm][-_NORMS:]
        return min(1.0, _OUTLIER * usual / norm) if known else None

    def _observe(self, gradients: list[HeldGradient], factors: Mapping[str, float]) -> None:
        """Let gradients enter the covariance, times the factor of their part, where it has one."""
        numbers, differences = {}, {}
        gradients = [one for one in gradients if one.part in factors]
        for one in gradients:
            spectrum = self._spectra[one.part]
            values = one.values.float() * factors[one.part]
            d = values - spectrum.mean.setdefault(one.name, torch.zeros_like(values))
            w = spectrum.direction.setdefault(one.name, torch.zeros_like(values))
            numbers[one.name] = torch.stack([inner(d, w), inner(d, d), inner(w, w)])
            differences[one.name] = d
        sums = self._sharing.summed(numbers, gradients, 3)
        for part, (d_w, d_d, w_w) in zip(self._sharing.parts, sums.tolist(), strict=True):
            if part in factors and d_d > 0:
                own = {one.name: differences[one.name] for one in gradients if one.part == part}
                self._advance(self._spectra[part], own, d_w, d_d, w_w)

    def _advance(
        self, spectrum: _Spectrum, differences: Mapping[str, Tensor], d_w: float, d_d: float, w_w: float
    ) -> None:
        """With weight a: mean += a d, C <- (1 - a) (C + a d d^T), and w as C's product with its own direction."""
        spectrum.steps += 1
        a = max(1 / spectrum.steps, 1 / self._memory_steps)
        along = d_w / math.sqrt(w_w) if w_w > 0 else math.sqrt(d_d)
        for name, d in differences.items():
            spectrum.mean[name].add_(d, alpha=a)
            spectrum.direction[name].add_(d, alpha=a * along).mul_(1 - a)
        cross = d_w if w_w > 0 else 0.0
        squared = w_w + 2 * a * along * cross + (a * along) ** 2 * d_d
        spectrum.lambda_max = (1 - a) * math.sqrt(squared)

    def state_dict(self) -> dict[str, Any]:
        """Of this rank, copied."""
        return {part: asdict(one) for part, one in self._spectra.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if set(state_dict) != set(self._spectra):
            raise ValueError(f"a state of {', '.join(sorted(state_dict))} for {', '.join(sorted(self._spectra))}")
        self._spectra = {part: deepcopy(_Spectrum(**state)) for part, state in state_dict.items()}
