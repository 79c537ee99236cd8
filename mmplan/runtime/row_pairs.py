"""Which of a context-parallel rank's rows see which rows of another rank, in sequences that lie one after the other.

Each rank has a chunk from the front of all rows and its counterpart from the back: of causal chunks every rank sees
equally many, and what it does not see is left out, chunk by chunk and sequence by sequence.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mmplan.runtime.block_attention import Pair
from mmplan.runtime.context import OwnRowsOf

# Of a mask that all layers of a model share, what was found: a look at its values stops a GPU.
Looks = dict[tuple[OwnRowsOf, OwnRowsOf], list[tuple[bool, bool]]]
_looks: MutableMapping[Tensor, Looks] = WeakTensorKeyDictionary()


def pieces(own: OwnRowsOf, lengths: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Of each piece of a sequence that the rank has: row among its own, sequence, first and end within the sequence."""
    for place, (first, end) in enumerate(own.chunks):
        start = 0
        for index, length in enumerate(lengths):
            low, high = max(first, start), min(end, start + length)
            if low < high:
                yield place * own.size + low - first, index, low - start, high - start
            start += length


@lru_cache(maxsize=256)
def pairs_with(
    own: OwnRowsOf, other: OwnRowsOf, lengths: tuple[int, ...], causal: bool, sliding: int | None
) -> tuple[Pair, ...]:
    """Of a rank's queries and another's keys, which see each other in part or all.

    Args:
        sliding: with `causal`, each row sees so many rows, itself included.
    """
    keys: dict[int, list[tuple[int, int, int]]] = {}
    for at, index, first, end in pieces(other, lengths):
        keys.setdefault(index, []).append((at, first, end))
    pairs = [
        pair
        for at, index, first, end in pieces(own, lengths)
        for key in keys.get(index, ())
        if (pair := _pair((at, first, end), key, causal, sliding)) is not None
    ]
    return tuple(_joined(pairs))


def _joined(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs alike that lie one behind the other (windows, images of a size) as one."""
    joined: list[Pair] = []
    for pair in pairs:
        last = joined[-1] if joined else None
        if last is not None and pair == replace(
            last, query=last.query + last.count * last.queries, key=last.key + last.count * last.keys, count=1
        ):
            joined[-1] = replace(last, count=last.count + 1)
        else:
            joined.append(pair)
    return joined


def _pair(query: tuple[int, int, int], key: tuple[int, int, int], causal: bool, sliding: int | None) -> Pair | None:
    """Of two pieces: row among a rank's own, first and end within the sequence."""
    (at, first, end), (key_at, low, high) = query, key
    if not causal:
        return Pair(at, end - first, key_at, high - low)
    least = 0 if sliding is None else first - sliding + 1
    key_at, low, high = key_at + max(0, least - low), max(low, least), min(high, end)
    if low >= high:
        return None
    sees_all = high <= first + 1 and (sliding is None or low >= end - sliding)
    window = None if sliding is None or low >= end - sliding else sliding
    return Pair(at, end - first, key_at, high - low, None if sees_all else first - low, window)


def pairs_under(mask: Tensor, own: OwnRowsOf, other: OwnRowsOf) -> tuple[Pair, ...]:
    """The same in one sequence under a mask of all its rows, [..., queries or 1, keys]: true where seen, or what is
    added to scores."""
    both = [(query, key) for query in pieces(own, (own.count,)) for key in pieces(other, (own.count,))]
    parts = [mask[..., low:high] for _, (_, _, low, high) in both]
    if mask.shape[-2] > 1:
        parts = [part[..., first:end, :] for part, ((_, _, first, end), _) in zip(parts, both, strict=True)]
    looks = _looks.setdefault(mask, {})
    if (own, other) not in looks:
        looks[own, other] = _looked_at(parts)
    found = []
    for part, (any_seen, all_seen), ((at, _, first, end), (key, _, low, high)) in zip(
        parts, looks[own, other], both, strict=True
    ):
        if any_seen:
            found.append(Pair(at, end - first, key, high - low, mask=None if all_seen else part))
    return tuple(found)


def _looked_at(parts: Sequence[Tensor]) -> list[tuple[bool, bool]]:
    """Of each part of a mask whether it shows anything, and whether all as it is."""
    bits = [part if part.dtype == torch.bool else part != -torch.inf for part in parts]
    plain = [part.all() if part.dtype == torch.bool else ~part.any() for part in parts]
    looks = [torch.stack((seen.any(), every)) for seen, every in zip(bits, plain, strict=True)]
    return [tuple(look) for look in torch.stack(looks).tolist()] if looks else []
