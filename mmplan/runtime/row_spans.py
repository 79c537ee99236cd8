"""Which rows go from rank to rank when rows of samples take places in longer samples, or are pooled with a stride.

Everything is an overlap of intervals, known to all ranks from lengths and offsets alone; no rank asks another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Span:
    """`rows` that follow each other, from `source` on where they are and from `target` on where they go."""

    source: int
    target: int
    rows: int


def placed_spans(
    lengths: Sequence[int], source: Sequence[int], firsts: Sequence[int], target: Sequence[int], giver: int, taker: int
) -> list[Span]:
    """Of one rank's rows those whose places another has, sample by sample; both counted within their own ranks.

    Args:
        lengths: rows of each sample; firsts: the place of its first one.
        source, target: first row, and first place, of each rank, and the end of the last one.
    """
    found = []
    for begin, length, first in zip((0, *accumulate(lengths)), lengths, firsts, strict=False):
        shift = first - begin
        low = max(begin, source[giver], target[taker] - shift)
        high = min(begin + length, source[giver + 1], target[taker + 1] - shift)
        if high > low:
            found.append(Span(low - source[giver], low + shift - target[taker], high - low))
    return found


def pooled_lengths(lengths: Sequence[int], stride: int) -> tuple[int, ...]:
    """Groups of so many rows in each sample; rows that fill no group are left out, as by a pooling layer."""
    return tuple(length // stride for length in lengths)


def pooled_offsets(lengths: Sequence[int], source: Sequence[int], stride: int) -> tuple[int, ...]:
    """First group of each rank, and the end of the last one: a group belongs to the rank that has its first row."""
    starts = [begin for begin, _ in _groups(lengths, stride)]
    return tuple(sum(start < first for start in starts) for first in source)


def pooled_spans(
    lengths: Sequence[int], source: Sequence[int], stride: int, giver: int, taker: int
) -> list[tuple[int, int, int]]:
    """(first row, rows, group) of each piece of a taker's group that the giver has, both counted within their own."""
    owners = pooled_offsets(lengths, source, stride)
    found = []
    for number, (begin, end) in enumerate(_groups(lengths, stride)):
        low, high = max(begin, source[giver]), min(end, source[giver + 1])
        if owners[taker] <= number < owners[taker + 1] and high > low:
            found.append((low - source[giver], high - low, number - owners[taker]))
    return found


def _groups(lengths: Sequence[int], stride: int) -> Iterator[tuple[int, int]]:
    """First row and end of each group."""
    for begin, end in pairwise((0, *accumulate(lengths))):
        for first in range(begin, end - stride + 1, stride):
            yield first, first + stride
