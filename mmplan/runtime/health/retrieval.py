"""Ranks in image-text retrieval: recall@k, and whether both directions agree about which pairs are hard (CMRC).

Of n pairs with similarity S = Z_image Z_text^T, r_i is the rank of text i among the texts for image i, and c_i that of
image i among the images for text i. CMRC = Spearman(r, c), ties sharing their mean rank. It sees *asymmetry*: texts
that are near every image (hubs) spoil r and not c. It does not see alignment that is random in both directions: for
independent S the two ranks both follow S_ii, and CMRC is about n / (n + 2), which a test shows. Where most pairs are
found first both ranks are nearly constant and their correlation says nothing: then it is not judged.
"""

import torch
from torch import Tensor
from torch.nn import functional

from mmplan.runtime.health.rule import Rule

RULE = Rule(
    monitor="cmrc",
    metric="Spearman correlation of the image->text and text->image ranks of the true pairs; not judged where either "
    "recall@1 and the other are both at least one half",
    unit="correlation",
    limit=0.78,
    fires="below",
    source="healthy above 0.78, reported in an article on multimodal parallel training",
    advice="look for hubs: captions that are alike or near every image, embeddings that are not normalised, and pairs "
    "that got mixed up in one direction of the loss only",
    certainty=0.7,
    explains=("loss",),
    patience=3,
)

LEAST_PAIRS = 8


def similarity(images: Tensor, texts: Tensor) -> Tensor:
    """Cosines of embeddings [n, d] and [m, d]: [n, m]."""
    return functional.normalize(images.float(), dim=-1) @ functional.normalize(texts.float(), dim=-1).T


def pair_ranks(scores: Tensor) -> Tensor:
    """Rank of the diagonal in its row, 1 the best; entries equal to it count half.

    Args:
        scores: [n, n].
    """
    own = scores.diagonal().unsqueeze(1)
    return 1 + (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2


def spearman(first: Tensor, second: Tensor) -> float:
    """Rank correlation of two vectors with mean ranks of ties; 1 where both are constant, 0 where one is."""
    one, other = _mean_ranks(first), _mean_ranks(second)
    one, other = one - one.mean(), other - other.mean()
    norms = float(one.norm()), float(other.norm())
    if min(norms) == 0.0:
        return float(max(norms) == 0.0)
    return float(one @ other) / (norms[0] * norms[1])


def cmrc(scores: Tensor) -> float | None:
    """CMRC of similarities [n, n] of n pairs; None where it cannot be judged."""
    forward, backward = pair_ranks(scores), pair_ranks(scores.T)
    found = float((forward <= 1).float().mean()), float((backward <= 1).float().mean())
    if len(scores) < LEAST_PAIRS or min(found) >= 0.5:
        return None
    return spearman(forward, backward)


def _mean_ranks(values: Tensor) -> Tensor:
    _, place, counts = torch.unique(values.double(), return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks: Tensor = (last - (counts.double() - 1) / 2)[place]
    return ranks
