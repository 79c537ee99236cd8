"""LayerNorm and RMSNorm of mixed sequences whose rows or columns lie on several ranks, with parameters per modality.

What one statistic covers may be split: the columns of a token under tensor parallelism, the tokens of a modality under
sequence parallelism. Ranks then add partial sums, kept apart by modality, before anything is divided; sums over all
modalities alike, or means of ranks' means, are wrong (`norm_diagnosis.py` tells which of them a layer used).
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmplan.kernels.segment_moments import segment_moments, statistics, token_moments
from mmplan.kernels.segment_norm import segment_layer_norm, segment_normalize, segment_rms_norm
from mmplan.runtime.norms import LAYER_NORM_EPS, RMS_NORM_EPS, wide
from mmplan.runtime.numerics.collectives import all_sum


class ModalityNorm(nn.Module):
    """x [..., own columns], modality [...] in 0..modalities-1 (anything else: padding, becomes zeros) -> x's shape.

    Args:
        width: columns that this rank has.
        over: what a statistic covers: a `token`'s columns, or all tokens of a `modality`.
        group: the ranks on which that lies: tensor-parallel ones of a token; of a modality, those with its tokens too.
            None: it lies here whole. Weights are the own columns'; their gradients are of the own tokens, and add
            over ranks with other tokens as those of any replicated weight.
    """

    def __init__(
        self,
        modalities: int,
        width: int,
        *,
        kind: Literal["layer", "rms"] = "layer",
        over: Literal["token", "modality"] = "token",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.over, self.group = kind, over, group
        self.weight = nn.Parameter(torch.ones(modalities, width))
        self.bias = nn.Parameter(torch.zeros(modalities, width)) if kind == "layer" else None

    def forward(self, x: Tensor, modality: Tensor) -> Tensor:
        if self.over == "token" and self.group is None:
            if self.kind == "rms":
                return segment_rms_norm(x, modality, self.weight, RMS_NORM_EPS)
            return segment_layer_norm(x, modality, self.weight, self.bias, LAYER_NORM_EPS)
        if self.kind == "rms":
            count, _, squares = self._summed(x, modality).unbind(-1)
            inverse_std = torch.rsqrt(squares / count.clamp(min=1) + RMS_NORM_EPS)
            return segment_normalize(x, modality, torch.zeros_like(inverse_std), inverse_std, self.weight)
        with torch.no_grad():  # sums of what is left of the mean lose no digits to it
            shift, _ = statistics(self._summed(x, modality))
        mean, inverse_std = statistics(self._summed(x, modality, shift), LAYER_NORM_EPS, shift)
        return segment_normalize(x, modality, mean, inverse_std, self.weight, self.bias)

    def _summed(self, x: Tensor, modality: Tensor, shift: Tensor | None = None) -> Tensor:
        """Count, sum and sum of squares over the group, of each modality or token."""
        if self.over == "modality":
            own = segment_moments(x, modality, len(self.weight), shift)
        else:
            own = token_moments(x if shift is None else wide(x) - shift)
        return own if self.group is None else all_sum(own, self.group)
