"""The ranks of some modules: how many replicas, how wide, where they begin; and who hands what to whom between two.

A microbatch of a step is one for the whole plan: the replicas of every mesh split its samples evenly and in order, so
with 8 vision replicas beside 2 language replicas each of the latter reads the outputs of 4, and with 1 a half of its
outputs. Meshes are nested: of two numbers of replicas one divides the other, so a part never straddles two replicas.

Between two meshes a rank gets its rows from each replica that holds some of them, whole over tp: shard i asks shard
i modulo tp of the other side, so that copies spread over all who hold them.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Mesh:
    """Modules with ranks of their own (none: all others of the plan); each of their stages has `ranks` ranks, stage by
    stage from `first_rank` on: replica, then cp, then tp."""

    modules: tuple[str, ...]
    tp: int
    dp: int
    first_rank: int
    cp: int = 1

    @property
    def width(self) -> int:
        """Ranks of a stage in one replica."""
        return self.cp * self.tp

    @property
    def ranks(self) -> int:
        """Ranks of a stage."""
        return self.dp * self.width

    def __str__(self) -> str:
        cp = f" x cp={self.cp}" if self.cp > 1 else ""
        return f"tp={self.tp}{cp} x dp={self.dp}"


def nested(dps: Iterable[int]) -> bool:
    """Whether of every two numbers of replicas one divides the other."""
    ascending = sorted(set(dps))
    return all(larger % smaller == 0 for smaller, larger in pairwise(ascending))


def partners(replica: int, own: Mesh, other: Mesh) -> range:
    """Replicas of the other mesh that hold samples of this one's replica."""
    if other.dp >= own.dp:
        each = other.dp // own.dp
        return range(replica * each, (replica + 1) * each)
    return range(replica // (own.dp // other.dp), replica // (own.dp // other.dp) + 1)


def giver(taker: int, source: Mesh, target: Mesh) -> tuple[int, ...]:
    """Shards of a source replica that a target shard gets its rows from: one for each cp part that holds some.

    Args:
        taker: cp index * tp + tp index in the target replica. One of the meshes has no cp.
    """
    if source.cp == 1:
        return (taker % source.tp,)
    return tuple(part * source.tp + taker % source.tp for part in range(source.cp))


def takers(shard: int, source: Mesh, target: Mesh) -> tuple[int, ...]:
    """Shards of a target replica that get rows from a source shard: the inverse of `giver`, for meshes without cp."""
    if source == target:
        return (shard,)
    return tuple(range(shard % source.tp, target.tp, source.tp))


def message_bytes(part_bytes: float, source: Mesh, target: Mesh) -> int:
    """Bytes between two ranks, of a tensor with `part_bytes` in the smaller of the two replicas."""
    return math.ceil(part_bytes / max(source.cp, target.cp))


def most_messages(source: Mesh, target: Mesh) -> int:
    """Messages that the busiest rank of either side sends or gets of one microbatch's tensor."""
    if source == target:
        return 1
    fan_out, fan_in = max(1, target.dp // source.dp), max(1, source.dp // target.dp)
    takers = target.width if source.cp == 1 else target.tp
    return max(fan_out * -(-takers // source.tp), fan_in * (source.cp if target.cp == 1 else 1))


def messages(source: Mesh, target: Mesh) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """((replica, shard) that sends, (replica, shard) that gets) of all messages of one microbatch's tensor."""
    for replica in range(target.dp):
        for shard in range(target.width):
            if source == target:
                yield (replica, shard), (replica, shard)
                continue
            for holder in partners(replica, target, source):
                for sender in giver(shard, source, target):
                    yield (holder, sender), (replica, shard)
