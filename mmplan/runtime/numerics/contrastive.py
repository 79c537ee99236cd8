"""Contrastive losses over a batch that lies on several ranks: InfoNCE (CLIP, arXiv 2103.00020) and SigLIP (2303.15343).

Each rank computes the rows of the B x B logits that belong to its own pairs, one other rank's columns at a time: memory
O(B^2 / N), no tensor larger than the gathered features or one rank pair's logits. Features come by one gather or around
the ring. All of it can be differentiated twice: Hessian-vector products equal those of the whole batch (encoders
with attention need torch's MATH kernel for that).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from mmplan.runtime.norms import wide
from mmplan.runtime.numerics.collectives import Group, gather_rows, place_in, row_counts, shift, total_loss

Exchange = Literal["gather", "ring"]


def info_nce(
    images: Tensor,
    texts: Tensor,
    scale: Tensor | float,
    *,
    averaged: bool,
    group: Group = None,
    exchange: Exchange = "gather",
) -> Tensor:
    """Mean over all pairs of the group of half the cross entropies image -> text and text -> image.

    Args:
        images, texts: [own pairs, width], normalised by the caller; row i of both is a pair. Ranks may differ in pairs.
        scale: of the dot products, the inverse temperature.
        averaged: gradients of parameters are averaged over the group afterwards (DDP, FSDP) rather than summed.

    Returns:
        The loss of the whole batch, on every rank, in fp32 or wider.
    """
    pairs = _Pairs.of(images, texts, group)
    rows = [F.pad(wide(x), (0, 0, 0, pairs.longest - len(x))) for x in (images, texts)]
    share = -2 * (rows[0] * rows[1]).sum() * scale
    for own, others in (rows, rows[::-1]):
        sums = []
        for owner, block in _blocks(others, pairs, group, exchange):
            padding = ~pairs.real(owner, own.device)
            logits = (own @ block.T * scale).masked_fill(padding, torch.finfo(own.dtype).min / 2)
            sums.append(torch.logsumexp(logits, 1))
        of_rows = torch.logsumexp(torch.stack(sums, 1), 1)
        share = share + (of_rows * pairs.real(pairs.rank, own.device)).sum()
    return total_loss(share / (2 * pairs.total), group, averaged=averaged)


def siglip(
    images: Tensor,
    texts: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    averaged: bool,
    group: Group = None,
    exchange: Exchange = "ring",
) -> Tensor:
    """-log sigmoid(z (scale x.y + bias)), z = 1 for pairs and -1 for others, summed over B x B and divided by B.

    Arguments and result as of `info_nce`; no softmax joins the columns, so that the ring is the paper's own way.
    """
    pairs = _Pairs.of(images, texts, group)
    x, y = (F.pad(wide(rows), (0, 0, 0, pairs.longest - len(rows))) for rows in (images, texts))
    own = pairs.real(pairs.rank, x.device)[:, None]
    share = x.new_zeros(())
    for owner, block in _blocks(y, pairs, group, exchange):
        logits = x @ block.T * scale + bias
        signs = 2 * torch.eye(pairs.longest, device=x.device) - 1 if owner == pairs.rank else -1
        counted = own & pairs.real(owner, x.device)
        share = share - (F.logsigmoid(signs * logits) * counted).sum()
    return total_loss(share / pairs.total, group, averaged=averaged)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Who has how many pairs. Rows are padded to the longest, so that the graphs of all ranks are alike."""

    rank: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, images: Tensor, texts: Tensor, group: Group) -> "_Pairs":
        if images.dim() != 2 or images.shape != texts.shape:
            raise ValueError(f"images {tuple(images.shape)} and texts {tuple(texts.shape)} are no pairs [pairs, width]")
        pairs = cls(place_in(group)[0], row_counts(len(images), group, images.device))
        if pairs.total == 0:
            raise ValueError("a contrastive loss of 0 pairs")
        return pairs

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def longest(self) -> int:
        return max(self.counts)

    def real(self, rank: int, device: torch.device) -> Tensor:
        """Which of a rank's padded rows are pairs."""
        return torch.arange(self.longest, device=device) < self.counts[rank]


def _blocks(rows: Tensor, pairs: _Pairs, group: Group, exchange: Exchange) -> Iterator[tuple[int, Tensor]]:
    """Every rank, with its rows."""
    size = len(pairs.counts)
    if exchange not in get_args(Exchange):
        raise ValueError(f"exchange '{exchange}' is none of {', '.join(get_args(Exchange))}")
    if exchange == "gather":
        yield from enumerate(gather_rows(rows, group).chunk(size))
        return
    for step in range(size):
        yield (pairs.rank - step) % size, rows
        if step < size - 1:
            rows = shift(rows, 1, group)
