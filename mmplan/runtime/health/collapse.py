"""Attention collapse: a cross-modal attention matrix that has become (nearly) one row, whatever is asked.

The spectrum of one attention matrix A (queries x keys): sigma_max / sigma_min over its min(queries, keys) singular
values. Rows that are all alike make A of rank one and the ratio infinite; rows that look at different keys keep it near
one. An untrained model attends nearly evenly and has a large ratio too, so the monitor waits for `warmup_steps`.
"""

import torch
from torch import Tensor

from mmplan.runtime.health.rule import Rule

RULE = Rule(
    monitor="attention_collapse",
    metric="sigma_max / sigma_min of the last cross-modal attention matrix, median over samples and heads; counts "
    "where the effective rank is below 2",
    unit="ratio",
    limit=12.5,
    fires="above",
    source="12.5 reported in an article on multimodal parallel training; no measurement of its own stands behind it; "
    "the rank is ours",
    advice="check the temperature and the norms of queries and keys (QK-norm), lower the learning rate of the "
    "cross-attention, and see whether all image tokens are alike",
    certainty=0.8,
    explains=("gradient_attenuation", "robustness", "loss"),
    patience=3,
)

# Rows that are all alike have an effective rank of one. The smallest singular value of a square matrix comes near zero
# by chance, however unlike its rows are: beside the ratio, fewer than two directions have to be left.
FEWEST_DIRECTIONS = 2.0

_TINY = 1e-12


def spectral_ratio(attention: Tensor) -> Tensor:
    """sigma_max / sigma_min of each matrix.

    Args:
        attention: weights [..., queries, keys].

    Returns:
        [...]; infinity is capped at 1e12.
    """
    values = torch.linalg.svdvals(attention.float())
    ratio: Tensor = values[..., 0] / values[..., -1].clamp(min=_TINY)
    return ratio


def effective_rank(attention: Tensor) -> Tensor:
    """exp of the entropy of the normalised singular values (Roy and Vetterli, "The effective rank", EUSIPCO 2007)."""
    values = torch.linalg.svdvals(attention.float())
    shares = values / values.sum(-1, keepdim=True).clamp(min=_TINY)
    rank: Tensor = torch.special.entr(shares).sum(-1).exp()
    return rank
