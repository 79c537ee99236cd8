"""Attention and rotary embedding on packed rows: sequences lie one after the other, without padding.

Neighbouring sequences of equal length share one call of `scaled_dot_product_attention`, so that fixed-size images cost
one call and nothing is copied: each call reads views of the packed rows. Flash kernels (CPU, and CUDA in 16 bit) take
grouped keys as they are; in fp32 on CUDA torch falls back to a kernel that keeps more than the cost model counts.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

ROPE_BASE = 10000.0  # RoFormer, arXiv 2104.09864, section 3.2.2


def window_lengths(lengths: Sequence[int], window: int) -> tuple[int, ...]:
    """Each sequence cut into windows of `window` rows and a shorter last one."""
    return tuple(min(window, length - start) for length in lengths for start in range(0, length, window))


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    causal: bool,
    sliding: int | None = None,
) -> tuple[Tensor, ...]:
    """Attention of each sequence's queries to its own keys.

    Args:
        q: [sum of query_lengths, heads * head_dim]; k: [sum of key_lengths, kv_heads * head_dim]; v may have heads of
            another width, and then has torch choose a kernel that takes it (on CPU one that keeps all scores).
        sliding: with `causal`, each row sees so many rows, itself included.

    Returns:
        Consecutive row blocks [rows, heads * width of a head of v], at least one. They stay apart because a joined copy
        would be kept beside them for the backward pass. Queries without keys give zeros.
    """
    blocks: list[Tensor] = []
    query_row = key_row = 0
    width = heads * (v.shape[1] // kv_heads)
    for (query_length, key_length), run in groupby(zip(query_lengths, key_lengths, strict=True)):
        count = len(list(run))
        rows, keys = count * query_length, count * key_length
        if rows and keys:
            is_band = sliding is not None and sliding < query_length
            attended = F.scaled_dot_product_attention(
                _by_head(q, query_row, count, query_length, heads),
                _by_head(k, key_row, count, key_length, kv_heads),
                _by_head(v, key_row, count, key_length, kv_heads),
                attn_mask=_band(query_length, sliding, q.device) if is_band else None,
                is_causal=causal and not is_band,
                enable_gqa=heads != kv_heads,
            )
            blocks.append(attended.transpose(1, 2).reshape(rows, width))
        elif rows:
            blocks.append(_zeros(q.narrow(0, query_row, rows), k, v, width))
        query_row, key_row = query_row + rows, key_row + keys
    return tuple(blocks) if blocks else (_zeros(q, k, v, width),)


def _zeros(q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
    """Zeros [rows of q, width] that autograd follows to q, k and v: whether a backward runs through a layer, and what
    it sends, then depends on the plan alone and not on which samples came."""
    return F.pad(q[:, :0], (0, width)) + k[:0].sum() + v[:0].sum()


@lru_cache(maxsize=8)
def _band(length: int, window: int | None, device: torch.device) -> Tensor:
    """Mask [length, length]: row i sees rows i - window + 1 to i."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - (window or length))


def _by_head(x: Tensor, first_row: int, count: int, length: int, heads: int) -> Tensor:
    """`count` sequences of `length` rows as a view [count, heads, length, head_dim]."""
    return x.narrow(0, first_row, count * length).view(count, length, heads, -1).transpose(1, 2)


@lru_cache(maxsize=16)
def rope_table(
    lengths: tuple[int, ...], head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, 1, head_dim] of each row's angle; shared by all layers that see the same lengths."""
    positions = torch.cat([torch.arange(length) for length in (0, *lengths)]).double()
    frequencies = ROPE_BASE ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.outer(positions, frequencies).repeat(1, 2).unsqueeze(1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotate(x: Tensor, lengths: Sequence[int], heads: int, dims: int | None = None) -> Tensor:
    """Rotary embedding by position in the sequence: [rows, heads * head_dim] -> same.

    Pairs element i with element i + head_dim / 2 of a head, as Hugging Face's LLaMA does. With `dims` only the last so
    many elements of a head turn.
    """
    whole = x.view(x.shape[0], heads, x.shape[1] // heads)
    still = whole.shape[2] - (dims or whole.shape[2])
    parts = whole[:, :, still:]
    cos, sin = rope_table(tuple(lengths), parts.shape[2], x.dtype, x.device)
    first, second = parts.chunk(2, dim=-1)
    rotated: Tensor = parts * cos + torch.cat((-second, first), dim=-1) * sin
    return (torch.cat((whole[:, :, :still], rotated), dim=-1) if still else rotated).view(x.shape)
