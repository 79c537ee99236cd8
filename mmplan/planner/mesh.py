"""The ranks of some modules: how many replicas, how wide, where they begin; and who hands what to whom between two.

A microbatch of a step is one for the whole plan: the replicas of every mesh split its samples evenly and in order, so
with 8 vision replicas beside 2 language replicas each of the latter reads the outputs of 4, and with 1 a half of its
outputs. With 3 beside 4 they overlap: the second of the 4 reads a third of its samples from the first of the 3. Samples
are counted in the smallest parts that are in one replica of either: least common multiple of the two numbers.

Between two meshes a rank gets its rows from each replica that holds some of them, whole over tp: shard i asks shard
i modulo tp of the other side, so that copies spread over all who hold them (`border.py` has other ways). Where a side
has cp its ranks hand over and get slices of the rows of each part, equal but for what fills up the last one: readers
gather the slices over cp, and sum and scatter the gradients. Of two numbers of cp ranks one divides the other.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, gcd, lcm

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


def nested(degrees: Iterable[int]) -> bool:
    """Whether of every two degrees one divides the other."""
    ascending = sorted(set(degrees))
    return all(larger % smaller == 0 for smaller, larger in pairwise(ascending))


def partners(replica: int, own: Mesh, other: Mesh) -> range:
    """Replicas of the other mesh that hold samples of this one's replica."""
    return overlapping(replica, own.dp, other.dp)


def overlapping(index: int, own: int, other: int) -> range:
    """Of `other` equal parts of a whole those that overlap the part `index` of `own` ones."""
    return range(index * other // own, -(-(index + 1) * other // own))


def shared_parts(replica: int, own: Mesh, partner: int, other: Mesh) -> int:
    """Of the smallest parts of two meshes those that are both in a replica of one and in a partner of the other."""
    together = lcm(own.dp, other.dp)
    a, b = together // own.dp, together // other.dp
    return min((replica + 1) * a, (partner + 1) * b) - max(replica * a, partner * b)


def parts_with(replica: int, own: Mesh, other: Mesh, parts: int) -> tuple[int, ...]:
    """Of a replica's share in `parts` equal parts of a microbatch how many each of its partners has too."""
    each = parts // lcm(own.dp, other.dp)
    return tuple(each * shared_parts(replica, own, partner, other) for partner in partners(replica, own, other))


def overlap_index(replica: int, own: int, partner: int, other: int) -> int:
    """Place, among all overlaps of `own` with `other` equal parts in their order, of that of two parts."""
    unit = gcd(own, other)
    a, b = own // unit, other // unit
    return replica // a * (a + b - 1) + replica % a + partner % b


def giver(taker: int, source: Mesh, target: Mesh) -> tuple[int, ...]:
    """Shards of a source replica that a target shard gets its rows from: one for each cp part that holds some.

    Args:
        taker: cp index * tp + tp index in the target replica.
    """
    parts = overlapping(taker // target.tp, target.cp, source.cp)
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
    """Bytes between two ranks of a part of a tensor with these loads: all of it, or a slice."""
    cut = slices(source, target)
    if cut == 1:
        return edge_bytes(edge, loads, precision)
    return edge.width * ceil(edge_rows(edge, loads) / cut) * DTYPE_BYTES[precision]


def edge_rows(edge: Edge, loads: Loads) -> float:
    """Rows of a microbatch's tensor."""
    rows: float = getattr(loads[edge.load_module], edge.load_field)
    return rows


@lru_cache(maxsize=4096)
def most_messages(source: Mesh, target: Mesh) -> tuple[int, float]:
    """Messages of one microbatch's tensor that the busiest rank of either side sends or gets, and how many of the
    smallest parts each has on average: 1 where of the numbers of replicas one divides the other."""
    if source == target:
        return 1, 1.0
    unit, together = gcd(source.dp, target.dp), lcm(source.dp, target.dp)
    fan_out, fan_in = (
        max(len(partners(replica, own, other)) for replica in range(own.dp // unit))
        for own, other in ((source, target), (target, source))
    )
    givers = [giver(taker, source, target) for taker in range(target.width)]
    sent, got = max(Counter(shard for shards in givers for shard in shards).values()), len(givers[0])
    count = max(fan_out * sent, fan_in * got)
    return count, max(together // source.dp * sent, together // target.dp * got) / count


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
