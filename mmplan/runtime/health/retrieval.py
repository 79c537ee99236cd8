"""Ranks in image-text retrieval: recall@k, and whether both directions agree about which pairs are hard (CMRC).

Of n pairs with similarity S = Z_image Z_text^T, r_i is the rank of text i among the texts for image i, and c_i that of
image i among the images for text i. CMRC = Spearman(r, c), ties sharing their mean rank. It sees *asymmetry*: texts
that are near every image (hubs) spoil r and not c. It does not see alignment that is random in both directions: for
independent S the two ranks both follow S_ii, and CMRC is about n / (n + 2), which a test shows. Where most pairs are
found first both ranks are nearly constant and their correlation says nothing: then it is not judged. While a model
learns, CMRC is low in both directions alike, from chance in ranks that lie close together (0.3 to 0.7 in runs that went
well): so it counts only where one direction has learned, recall@1 at least one half, and finds more pairs than the
other beyond chance: a sign test of the pairs that one direction alone finds first.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from mmplan.runtime.health.rule import Rule

RULE = Rule(
    monitor="cmrc",
    metric="Spearman correlation of the image->text and text->image ranks of the true pairs; counts where one "
    "recall@1 is at least one half and the other is below it, beyond chance",
    unit="correlation",
    limit=0.78,
    fires="below",
    source="healthy above 0.78, reported in an article on multimodal parallel training; ours: one direction has "
    "learned, the other is worse with p < 0.001",
    advice="look for hubs: captions that are alike or near every image, embeddings that are not normalised, and pairs "
    "that got mixed up in one direction of the loss only",
    certainty=0.7,
    explains=("loss",),
    patience=3,
)

LEAST_PAIRS = 8
LEARNED_RECALL, CHANCE = 0.5, 1e-3


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
    if len(scores) < LEAST_PAIRS or min(recalls(scores)) >= LEARNED_RECALL:
        return None
    return spearman(pair_ranks(scores), pair_ranks(scores.T))


def recalls(scores: Tensor) -> tuple[float, float]:
    """Recall@1 of image -> text and of text -> image."""
    return float((pair_ranks(scores) <= 1).float().mean()), float((pair_ranks(scores.T) <= 1).float().mean())


def one_sided(scores: Tensor) -> bool:
    """Whether one direction has learned and the other is worse than it by more than chance: where either direction is
    as likely to be the one that finds a pair, this is so in at most one reading of a thousand."""
    forward, backward = pair_ranks(scores) <= 1, pair_ranks(scores.T) <= 1
    alone = sorted((int((forward & ~backward).sum()), int((backward & ~forward).sum())))
    tail = sum(math.comb(sum(alone), k) for k in range(alone[0] + 1)) / 2 ** sum(alone)
    return max(recalls(scores)) >= LEARNED_RECALL and 2 * tail <= CHANCE


def _mean_ranks(values: Tensor) -> Tensor:
    _, place, counts = torch.unique(values.double(), return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks: Tensor = (last - (counts.double() - 1) / 2)[place]
    return ranks
