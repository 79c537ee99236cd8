"""Seconds of collectives: alpha-beta by algorithm, message size and network level.

Rings move (n - 1) / n of a tensor over the slowest link with n - 1 latencies, trees with log2(n) (Thakur,
Rabenseifner, Gropp, IJHPCA 2005, sections 4.1-4.5); NCCL takes the faster. Across nodes a collective is a reduction
inside each node followed by rings over the nodes, one for each rank of the group in a node; `Link.bytes_per_s` is one
device's share of its node's network ports, so a group with r ranks in a node has r shares, and groups in one node share
it fairly.
"""

import math
from dataclasses import dataclass

from mmplan.scenario.cluster import Link


@dataclass(frozen=True, slots=True)
class Group:
    """`ranks` that communicate, `per_node` of them in each node."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.per_node)


def group_of(ranks: int, stride: int, devices_per_node: int) -> Group:
    """The group of `ranks` ranks that are `stride` apart in rank order."""
    inside = max(1, devices_per_node // stride)
    return Group(ranks, min(ranks, inside))


def gather_s(full_bytes: float, group: Group, node_link: Link, network_link: Link) -> float:
    """All-gather to, or reduce-scatter of, a tensor of `full_bytes` on every rank: the same volume each way."""
    if group.ranks == 1 or full_bytes <= 0:
        return 0.0
    inside, nodes = group.per_node, group.nodes
    across = _half_ring_s(full_bytes / inside, nodes, network_link)
    return _half_ring_s(full_bytes, inside, node_link) + across


def all_reduce_s(full_bytes: float, group: Group, node_link: Link, network_link: Link) -> float:
    """All-reduce = reduce-scatter + all-gather."""
    return 2 * gather_s(full_bytes, group, node_link, network_link)


def all_to_all_s(rank_bytes: float, group: Group, node_link: Link, network_link: Link) -> float:
    """Each rank sends `rank_bytes` in equal parts to all ranks, itself included; levels work at the same time."""
    if group.ranks == 1 or rank_bytes <= 0:
        return 0.0
    inside = rank_bytes * (group.per_node - 1) / group.ranks
    across = rank_bytes * (group.ranks - group.per_node) / group.ranks
    return max(message_s(inside, node_link), message_s(across, network_link))


def message_s(bytes_sent: float, link: Link) -> float:
    """latency + bytes / bandwidth (the alpha-beta model, same paper, section 3)."""
    return link.latency_s + bytes_sent / (link.bytes_per_s * link.fraction) if bytes_sent > 0 else 0.0


def _half_ring_s(full_bytes: float, ranks: int, link: Link) -> float:
    """(n - 1) / n of the bytes, and the latencies of a ring or of a tree, whichever has fewer."""
    if ranks == 1:
        return 0.0
    steps = min(ranks - 1, math.ceil(math.log2(ranks)))
    return steps * link.latency_s + full_bytes * (ranks - 1) / ranks / (link.bytes_per_s * link.fraction)
