"""What the graph alone says about the order of stages: how much of it is a row, and how wide the rest is."""

from collections.abc import Sequence

import numpy as np

from mmplan.planner.upsets import BoolArray


def ancestors(groups: int, pairs: Sequence[tuple[int, int]]) -> BoolArray:
    """[g, a] True where a leads to g; groups are numbered in topological order."""
    found = np.zeros((groups, groups), dtype=np.bool_)
    for producer, consumer in sorted(pairs, key=lambda pair: pair[1]):
        found[consumer] |= found[producer]
        found[consumer, producer] = True
    return found


def tail_start(groups: int, pairs: Sequence[tuple[int, int]]) -> int:
    """The first of the last groups that each follow all groups before them; `groups` when the last does not.

    >>> tail_start(4, [(0, 2), (1, 2), (2, 3)])
    2
    """
    follows_all = ancestors(groups, pairs).sum(axis=1) == np.arange(groups)
    others = np.flatnonzero(~follows_all)
    return int(others[-1]) + 1 if len(others) else 0


def chain_cover(groups: int, pairs: Sequence[tuple[int, int]]) -> int:
    """Chains that together hold the first `groups` groups: no more of these stand side by side (at least 1).

    >>> chain_cover(3, [(0, 2), (1, 2)])
    2
    """
    known = ancestors(groups, [pair for pair in pairs if pair[1] < groups])
    ends: list[int] = []
    for group in range(groups):
        before = next((index for index, end in enumerate(ends) if known[group, end]), None)
        if before is None:
            ends.append(group)
        else:
            ends[before] = group
    return max(1, len(ends))


def chains(groups: int, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """The longest rows of groups that feed only the next and are fed only by the one before.

    >>> chains(5, [(0, 1), (1, 3), (2, 3), (3, 4)])
    ((0, 1), (2,), (3, 4))
    """
    consumers: list[list[int]] = [[] for _ in range(groups)]
    producers: list[list[int]] = [[] for _ in range(groups)]
    for producer, consumer in pairs:
        consumers[producer].append(consumer)
        producers[consumer].append(producer)
    rows: dict[int, list[int]] = {}
    row_of: dict[int, int] = {}
    for group in range(groups):
        before = producers[group]
        joins = len(before) == 1 and len(consumers[before[0]]) == 1
        row_of[group] = row_of[before[0]] if joins else group
        rows.setdefault(row_of[group], []).append(group)
    return tuple(tuple(row) for row in rows.values())
