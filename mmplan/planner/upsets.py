"""The upsets of a layer DAG: the sets of groups that the last k stages of some acyclic cut can hold together.

An upset holds, with a group, everything that follows it. An acyclic cut is a chain of upsets from the empty one to all
groups; each stage is the difference of two neighbours. Branches multiply their numbers, chains add them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

# 1,250 upsets are two 32-layer encoders beside each other; 3,500 give 6 M pairs, 100 MB and 0.3 s
MAX_UPSETS = 3500


@dataclass(frozen=True, kw_only=True, slots=True)
class Upsets:
    """All upsets, smallest first, and all pairs `below` < `above` by inclusion, sorted by `below`.

    `member[i, g]`: upset i holds group g. `frontier[i, w]`: the w-th group outside upset i that feeds a group inside,
    -1 where there are fewer.
    """

    member: BoolArray
    frontier: IntArray
    below: IntArray
    above: IntArray

    @property
    def count(self) -> int:
        return int(self.member.shape[0])


def enumerate_upsets(
    groups: int, edges: Sequence[tuple[int, int]], limit: int = MAX_UPSETS, mesh_of: Sequence[int] = ()
) -> Upsets | None:
    """All upsets of the DAG with these (producer, consumer) edges, or None when there are more than `limit`.

    Args:
        mesh_of: number of each group's mesh; an upset then holds a group only with all groups of higher meshes.
    """
    successors = [0] * groups
    for producer, consumer in edges:
        successors[producer] |= 1 << consumer
    for group, mesh in enumerate(mesh_of):
        successors[group] |= sum(1 << other for other, higher in enumerate(mesh_of) if higher > mesh)
    seen = {0}
    queue = [0]
    for upset in queue:
        for group in range(groups):
            larger = upset | (1 << group)
            if larger not in seen and successors[group] & ~upset == 0:
                if len(seen) >= limit:
                    return None
                seen.add(larger)
                queue.append(larger)
    queue.sort(key=lambda upset: (upset.bit_count(), upset))
    member = np.array([[upset >> group & 1 for group in range(groups)] for upset in queue], dtype=np.bool_)
    below, above = _pairs(member)
    return Upsets(member=member, frontier=_frontier(member, edges), below=below, above=above)


def _pairs(member: BoolArray) -> tuple[IntArray, IntArray]:
    """Indices of all pairs of upsets of which the second holds the first and more."""
    words = np.packbits(member, axis=1)
    words = np.pad(words, ((0, 0), (0, -words.shape[1] % 8))).view(np.uint64)
    above = []
    for index in range(len(words)):
        larger = words[index + 1 :]
        above.append(index + 1 + np.flatnonzero(((larger & words[index]) == words[index]).all(axis=1)))
    below = np.repeat(np.arange(len(words), dtype=np.int64), [len(found) for found in above])
    return below, np.concatenate(above).astype(np.int64)


def _frontier(member: BoolArray, edges: Sequence[tuple[int, int]]) -> IntArray:
    """Producers outside each upset with a consumer inside, ascending, padded with -1 to the widest."""
    feeds = np.zeros_like(member)
    for producer, consumer in edges:
        feeds[:, producer] |= ~member[:, producer] & member[:, consumer]
    width = max(1, int(feeds.sum(axis=1).max()))
    frontier = np.full((len(member), width), -1, dtype=np.int64)
    rows, columns = np.nonzero(feeds)
    slot = np.cumsum(feeds, axis=1)[rows, columns] - 1
    frontier[rows, slot] = columns
    return frontier


def sums_over(member: BoolArray, values: Sequence[int]) -> IntArray:
    """[upsets] the sum of a per-group value over the groups of each row."""
    sums: IntArray = member.astype(np.int64) @ np.array(values, dtype=np.int64)
    return sums
