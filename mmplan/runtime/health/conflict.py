"""Shared-parameter conflict: two modalities that pull one parameter in opposite directions.

Gradients that uses of a shared parameter send to it, their cosine and norms. Mitigation scales the stronger one by
alpha
while they conflict, so that the weaker side is no longer drowned: with g = g_weak + alpha g_strong the weak side's loss
falls to first order if and only if ||g_weak|| > -alpha cos ||g_strong||, and a larger alpha only makes that harder.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from torch import Tensor

from mmplan.runtime.health.placed import inner_product
from mmplan.runtime.health.rule import Rule

ALPHA = 0.3  # reported in an article on multimodal parallel training

RULE = Rule(
    monitor="shared_conflict",
    metric="smallest cosine of the gradients that two uses send to one shared parameter",
    unit="cosine",
    limit=-0.3,
    fires="below",
    source="ours; gradients with a cosine below 0 conflict (Yu et al., Gradient Surgery, NeurIPS 2020), and -0.3 "
    "leaves room for the noise of small batches",
    advice="scale the stronger side while it lasts (attach(mitigation=0.3)), untie the parameter or balance the losses",
    certainty=0.75,
    explains=("gradient_attenuation", "loss"),
    patience=3,
)


class Conflict(NamedTuple):
    """The two uses with the smallest cosine, the stronger first, and its norm over the other's."""

    stronger: str
    weaker: str
    cosine: float
    norm_ratio: float


def worst_conflict(gradients: Mapping[str, Tensor]) -> Conflict | None:
    """Of gradients of one shape by use; None with fewer than two that are not zero."""
    found = []
    norms = {name: inner_product(g, g) ** 0.5 for name, g in gradients.items()}
    for one, other in combinations((name for name in gradients if norms[name] > 0), 2):
        product = inner_product(gradients[one], gradients[other])
        strong, weak = (one, other) if norms[one] >= norms[other] else (other, one)
        found.append(Conflict(strong, weak, product / (norms[one] * norms[other]), norms[strong] / norms[weak]))
    return min(found, key=lambda pair: pair.cosine, default=None)


def scales(pair: Conflict | None, names: Sequence[str], limit: float, alpha: float = ALPHA) -> dict[str, float]:
    """What to multiply each use's gradient with: alpha for the stronger of a conflict, 1 otherwise."""
    strong = pair.stronger if pair is not None and pair.cosine < limit else None
    return {name: alpha if name == strong else 1.0 for name in names}
