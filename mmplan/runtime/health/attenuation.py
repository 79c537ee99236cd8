"""Cross-modal gradient attenuation: which part of the loss's gradient still reaches each modality.

Of gradients g_m of the loss with respect to what modality m hands to the fusion, the share of m is ||g_m|| / sum of all
||g||. Along a cross-attention these are its query and key side; at the outputs h_m of the branches each norm is
multiplied with the root mean square of h_m, so that the scale of an output changes nothing. Reported shares are 68.2 %
and 31.7 % (ViLT), 59.1 % and 38.5 % (FLAVA), of two modalities; of n the share is multiplied with n / 2, so that an
even one is one half.
"""

from collections.abc import Mapping

from mmplan.runtime.health.rule import Rule

RULE = Rule(
    monitor="gradient_attenuation",
    metric="||gradient at the modality's output|| / sum over modalities, times n / 2 of n modalities; along a "
    "cross-attention, of its two inputs",
    unit="share",
    limit=0.05,
    fires="below",
    source="ours: a sixth of the smallest share reported for a healthy model (31.7 %, ViLT)",
    advice="look for a detach, a frozen or saturated projector, a scale between branch and fusion, or a loss that the "
    "other modality solves alone; raise that modality's learning rate or loss weight only then",
    certainty=0.75,
    explains=("loss",),
    patience=3,
)


def shares(norms: Mapping[str, float]) -> dict[str, float]:
    """Share of each modality of the sum of the norms; all 0 where there is no gradient at all."""
    total = sum(norms.values())
    return {name: norm / total if total > 0 else 0.0 for name, norm in norms.items()}
