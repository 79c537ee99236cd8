"""Attention of a context-parallel rank's rows to the keys of all, as the plan says: these pass around a ring, or are
gathered, and again for the backward, so that between the two a rank keeps its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmplan.runtime.block_attention import Pair
from mmplan.runtime.context import OwnRowsOf, gather_rows
from mmplan.runtime.ring_attention import ring_attention
from mmplan.runtime.row_pairs import pairs_with, pieces
from mmplan.runtime.tensor_sums import Peers, TensorRanks
from mmplan.scenario.technique import ContextParallel


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """How rows of packed sequences attend: numbers of heads, and what a row sees.

    Attributes:
        sliding: with `causal`, each row sees so many rows, itself included.
    """

    queries: int
    keys: int
    causal: bool = False
    sliding: int | None = None


def own_attention(
    parts: tuple[Tensor, Tensor, Tensor],
    own: OwnRowsOf,
    ranks: TensorRanks,
    peers: Peers,
    *,
    lengths: Sequence[int],
    heads: Heads,
    way: ContextParallel,
) -> Tensor:
    """A rank's queries against the keys and values of all rows: each of its rows alone -> its rows."""
    if not own.count:
        return _filled([], *parts, own, heads)
    if way == "ring":
        return _around(parts, own, ranks, peers, tuple(lengths), heads)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (gather_rows(x, own, ranks, peers) for x in (k, v))
        return _attended(q, keys, values, own, lengths, heads)

    if not torch.is_grad_enabled() or not any(x.requires_grad for x in parts):
        return run(*parts)
    result: Tensor = checkpoint(run, *parts, use_reentrant=False, preserve_rng_state=False)
    return result


def _around(
    parts: tuple[Tensor, Tensor, Tensor],
    own: OwnRowsOf,
    ranks: TensorRanks,
    peers: Peers,
    lengths: tuple[int, ...],
    heads: Heads,
) -> Tensor:
    def pairs(source: int) -> Sequence[Pair]:
        return pairs_with(own, replace(own, index=source), lengths, heads.causal, heads.sliding)

    counts = (heads.queries, heads.keys, heads.keys)
    q, k, v = (x.view(1, x.shape[0], count, -1) for x, count in zip(parts, counts, strict=True))
    return ring_attention(q, k, v, pairs, ranks, peers).reshape(q.shape[1], -1)


def own_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own: OwnRowsOf,
    *,
    lengths: Sequence[int],
    key_lengths: Sequence[int],
    heads: Heads,
) -> Tensor:
    """Cross-attention of a rank's rows to a context that every rank has whole."""
    starts = [sum(key_lengths[:index]) for index in range(len(key_lengths) + 1)]
    blocks = [
        _one(q[at : at + end - first], k[starts[i] : starts[i + 1]], v[starts[i] : starts[i + 1]], None, heads)
        for at, i, first, end in pieces(own, lengths)
    ]
    return _filled(blocks, q, k, v, own, heads)


def _attended(q: Tensor, k: Tensor, v: Tensor, own: OwnRowsOf, lengths: Sequence[int], heads: Heads) -> Tensor:
    blocks, sliding = [], heads.sliding
    for at, index, first, end in pieces(own, lengths):
        start = sum(lengths[:index])
        low = max(0, first - sliding + 1) if sliding is not None else 0
        high = end if heads.causal else lengths[index]
        mask = _mask(first, end, low, high, sliding, q.device) if heads.causal else None
        keys, values = k[start + low : start + high], v[start + low : start + high]
        blocks.append(_one(q[at : at + end - first], keys, values, mask, heads))
    return _filled(blocks, q, k, v, own, heads)


def _one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: Heads) -> Tensor:
    """[rows, heads * width of a head of v]; without keys zeros."""
    if k.shape[0] == 0:
        return F.pad(q[:, :0], (0, heads.queries * (v.shape[1] // heads.keys)))

    def by_head(x: Tensor, count: int) -> Tensor:
        return x.view(1, x.shape[0], count, -1).transpose(1, 2)

    attended = F.scaled_dot_product_attention(
        by_head(q, heads.queries),
        by_head(k, heads.keys),
        by_head(v, heads.keys),
        attn_mask=mask,
        enable_gqa=heads.queries != heads.keys,
    )
    return attended.transpose(1, 2).reshape(q.shape[0], -1)


def _filled(blocks: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, own: OwnRowsOf, heads: Heads) -> Tensor:
    """Blocks in the order of the rank's rows, zeros where a chunk ends early; autograd follows all three inputs."""
    width, rows = heads.queries * (v.shape[1] // heads.keys), [end - first for first, end in own.chunks]
    joined = torch.cat(list(blocks)) if blocks else F.pad(q[:0, :0], (0, width))
    parts = torch.split(joined, rows)
    filled = torch.cat([F.pad(part, (0, 0, 0, own.size - part.shape[0])) for part in parts])
    # Products keep their factors, so that a rank without rows, too, runs the gathers once more for the backward.
    return filled + sum((x[:0] * x[:0]).sum() for x in (q, k, v))


def _mask(first: int, end: int, low: int, high: int, sliding: int | None, device: torch.device) -> Tensor:
    """[queries from first to end, keys from low to high]: keys up to the query, and no farther back than the window."""
    behind = torch.arange(first, end, device=device).unsqueeze(1) - torch.arange(low, high, device=device)
    return behind >= 0 if sliding is None else (behind >= 0) & (behind < sliding)
