"""The ranks of some modules: how many replicas, how wide, where they begin; and who hands what to whom between two.

A microbatch of a step is one for the whole plan: the replicas of every mesh split its samples evenly and in order, so
with 8 vision replicas beside 2 language replicas each of the latter reads the outputs of 4, and with 1 a half of its
outputs. Meshes are nested: of two numbers of replicas one divides the other, so a part never straddles two replicas.

Between two meshes a rank gets its rows from each replica that holds some of them, whole over tp: shard i asks shard
i modulo tp of the other side, so that copies spread over all who hold them. Where a side has cp its ranks hand over and
get slices of the rows of each part, equal but for what fills up the last one: those who read them gather the slices
over cp, and sum and scatter the gradients. Of two numbers of cp ranks one divides the other.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from mmplan.cost_models.counts import edge_bytes
from mmplan.cost_models.graph import Edge
from mmplan.cost_models.load import Loads
from mmplan.scenario.scenario import DTYPE_BYTES, Dtype


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Mesh:
    """Modules with ranks of their own (none: all others of the plan); each of their stages has `ranks` ranks, stage by
    stage from `first_rank` on: replica, then cp, then tp.

    Experts of modules with ranks of their own lie whole on ep ranks of a stage, or while ep is 1 are split as the rest.
    With cp (and tp 1) modules with ranks of their own are whole on each rank: those in `patches` have the rows of all
    images cut over cp, the others take images or clips in turn, see `Layout.spread`.
    """

    modules: tuple[str, ...]
    tp: int
    dp: int
    first_rank: int
    cp: int = 1
    patches: tuple[str, ...] = ()
    ep: int = 1

    @property
    def spread(self) -> tuple[str, ...]:
        """Modules that are not split by tp."""
        return self.modules if self.cp > 1 else ()

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
        experts = f" (ep={self.ep})" if self.ep > 1 else ""
        return f"tp={self.tp}{cp} x dp={self.dp}{experts}"


def nested(dps: Iterable[int]) -> bool:
    """Whether of every two numbers of replicas one divides the other."""
    ascending = sorted(set(dps))
    return all(larger % smaller == 0 for smaller, larger in pairwise(ascending))


def partners(replica: int, own: Mesh, other: Mesh) -> range:
    """Replicas of the other mesh that hold samples of this one's replica."""
    return _overlapping(replica, own.dp, other.dp)


def _overlapping(index: int, own: int, other: int) -> range:
    """Of `other` equal parts those that overlap the part `index` of `own` ones."""
    if other >= own:
        each = other // own
        return range(index * each, (index + 1) * each)
    return range(index // (own // other), index // (own // other) + 1)


def giver(taker: int, source: Mesh, target: Mesh) -> tuple[int, ...]:
    """Shards of a source replica that a target shard gets its rows from: one for each cp part that holds some.

    Args:
        taker: cp index * tp + tp index in the target replica.
    """
    parts = _overlapping(taker // target.tp, target.cp, source.cp)
    return tuple(part * source.tp + taker % source.tp for part in parts)


@lru_cache(maxsize=4096)
def takers(shard: int, source: Mesh, target: Mesh) -> tuple[int, ...]:
    """Shards of a target replica that get rows from a source shard: the inverse of `giver`."""
    if source == target:
        return (shard,)
    return tuple(taker for taker in range(target.width) if shard in giver(taker, source, target))


def slices(source: Mesh, target: Mesh) -> int:
    """Into how many the rows of a part are cut between two meshes."""
    return max(source.cp, target.cp)


def message_bytes(edge: Edge, loads: Loads, precision: Dtype, source: Mesh, target: Mesh) -> int:
    """Bytes between two ranks of a tensor with `loads` in the smaller of the two replicas: whole, or a slice."""
    cut = slices(source, target)
    if cut == 1:
        return edge_bytes(edge, loads, precision)
    return edge.width * math.ceil(edge_rows(edge, loads) / cut) * DTYPE_BYTES[precision]


def edge_rows(edge: Edge, loads: Loads) -> float:
    """Rows of a microbatch's tensor."""
    rows: float = getattr(loads[edge.load_module], edge.load_field)
    return rows


def joined_bytes(message: int, source: Mesh, target: Mesh) -> int:
    """Of all slices of `message` bytes that a target replica gathers over cp; 0 where none are to be joined."""
    if source == target or target.cp == 1:
        return 0
    return message * slices(source, target) * max(1, source.dp // target.dp)


@lru_cache(maxsize=4096)
def most_messages(source: Mesh, target: Mesh) -> int:
    """Messages that the busiest rank of either side sends or gets of one microbatch's tensor."""
    if source == target:
        return 1
    fan_out, fan_in = max(1, target.dp // source.dp), max(1, source.dp // target.dp)
    givers = [giver(taker, source, target) for taker in range(target.width)]
    sent = Counter(shard for shards in givers for shard in shards)
    return max(fan_out * max(sent.values()), fan_in * len(givers[0]))


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
