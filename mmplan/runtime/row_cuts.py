"""Which rows of packed samples each rank of a mesh axis gets: whole samples, balanced tokens, counts, as they are held.

Rows stay in their order, so a cut is the first row of each rank; a rank may have none.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal


@dataclass(frozen=True, slots=True)
class Ragged:
    """How dim 0, packed samples of unlike lengths, is dealt over a mesh axis; stands where a placement does.

    Attributes:
        cut: "samples": whole samples, as equal in number as can be, the first ranks have the most. "tokens": whole
            samples, such that the rank with the most rows has as few as whole samples in this order allow. "held": each
            rank gives its own rows, and they follow each other in rank order. Or the rows of each rank, outright.
    """

    cut: Literal["samples", "tokens", "held"] | tuple[int, ...]


def row_offsets(cut: Literal["samples", "tokens"] | tuple[int, ...], lengths: Sequence[int], ranks: int) -> list[int]:
    """First row of each rank, and the end of the last one.

    Raises:
        ValueError: counts that are not those of the ranks or of the rows.
    """
    if isinstance(cut, tuple):
        if len(cut) != ranks or min(cut, default=0) < 0:
            raise ValueError(f"rows {cut} are {len(cut)} counts, and the axis has {ranks} ranks with 0 rows or more")
        if sum(cut) != sum(lengths):
            raise ValueError(f"rows {' + '.join(map(str, cut))} = {sum(cut)}, and the tensor has {sum(lengths)}")
        return [0, *accumulate(cut)]
    ends = [0, *accumulate(lengths)]
    first = _even(len(lengths), ranks) if cut == "samples" else _balanced(lengths, ranks)
    return [ends[sample] for sample in first]


def chunk_offsets(rows: int, ranks: int) -> list[int]:
    """The rule of `torch.chunk` and of DTensor's `Shard`: equal chunks rounded up, the last ranks have what is left."""
    size = -(-rows // ranks)
    return [min(rank * size, rows) for rank in range(ranks + 1)]


def cut_lengths(lengths: Sequence[int], first: int, end: int) -> tuple[int, ...]:
    """Rows of each sample, or part of one, within rows [first, end); samples without rows are left out."""
    ends = accumulate(lengths)
    pieces = [(max(first, stop - length), min(end, stop)) for length, stop in zip(lengths, ends, strict=True)]
    return tuple(stop - start for start, stop in pieces if stop > start)


def overlaps(source: Sequence[int], target: Sequence[int], rank: int) -> tuple[list[int], list[int]]:
    """Rows that `rank` sends to each rank and receives from each when a cut becomes another one."""
    ranks = range(len(source) - 1)

    def common(a: int, b: int) -> int:
        return max(0, min(source[a + 1], target[b + 1]) - max(source[a], target[b]))

    return [common(rank, peer) for peer in ranks], [common(peer, rank) for peer in ranks]


def _even(samples: int, ranks: int) -> list[int]:
    few, more = divmod(samples, ranks)
    return [rank * few + min(rank, more) for rank in range(ranks + 1)]


def _balanced(lengths: Sequence[int], ranks: int) -> list[int]:
    """Smallest cap for which filling rank after rank up to it places all samples; by bisection, so exact."""
    least, most = max(max(lengths, default=0), -(-sum(lengths) // ranks)), sum(lengths)
    cap = least + bisect_left(range(least, most), True, key=lambda cap: len(_filled(lengths, cap)) <= ranks)
    first = _filled(lengths, cap)
    return [*first, *[len(lengths)] * (ranks + 1 - len(first))]


def _filled(lengths: Sequence[int], cap: int) -> list[int]:
    first, rows = [0], 0
    for sample, length in enumerate(lengths):
        if rows + length > cap:
            first.append(sample)
            rows = 0
        rows += length
    return first
