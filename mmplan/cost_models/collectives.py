"""Seconds of collectives: alpha-beta by algorithm, message size and network level; the fastest algorithm is taken.

A tensor of B bytes over n ranks of one level, with latency a and rate b of its link, takes

    ring    gather or reduce-scatter (n - 1) a + (n - 1) / n B / b, all-reduce both (Thakur, Rabenseifner, Gropp,
            IJHPCA 2005, sections 4.1 and 4.5; NCCL all-gathers by rings only)
    tree    all-reduce 2 log2(n) a + 2 B / (0.92 b): a double binary tree (Sanders, Speck, Traeff, Parallel Computing
            35, 2009) at NCCL's share of the ring's rate (src/graph/tuning.cc)
    switch  all-reduce s + B / (r b): the switch adds, each rank sends and receives B once (Klenk et al., ISCA 2020).
            NVLS inside a node, SHARP across nodes, where the link says so (`Link.nvls`, `Link.sharp`)

Across nodes a collective is a reduction inside each node, one exchange over the nodes for each rank of the group in a
node, and a gather inside; `Link.bytes_per_s` is one device's share of its node's network ports, so a group with r ranks
in a node has r shares, and groups in one node share it fairly. The network is taken to be rail-optimised: equal ranks
of all nodes hang on one switch, and what is for another rail changes it inside the node first (NCCL 2.12, PXN), so
rings and all-to-alls stay on their rail; `Link.oversubscription` is for networks that are not.
"""

import math
from dataclasses import dataclass

from mmplan.scenario.cluster import Link

TREE_RATE = 0.92  # of the ring's: NCCL 2.18 src/graph/tuning.cc, ncclTopoTuneModel
NVLS_RATE = 5 / 6  # NCCL 2.19 src/graph/tuning.cc: algorithm bandwidth of NVLS
NVLS_LATENCY_S = 25e-6  # NCCL 2.18 src/graph/tuning.cc, hwLat: NVLINK, NVLS
SHARP_RATE = 0.95  # of point-to-point messages, streaming aggregation (Graham et al., ISC 2020, abstract)
SHARP_LATENCY_S = 31e-6  # NCCL 2.18 src/graph/tuning.cc, hwLat: NET, CollNetDirect


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
    """All-reduce of a tensor of `full_bytes` on every rank."""
    if group.ranks == 1 or full_bytes <= 0:
        return 0.0
    inside, nodes = group.per_node, group.nodes
    if nodes == 1:
        return _one_level_s(full_bytes, inside, node_link)
    return 2 * _half_ring_s(full_bytes, inside, node_link) + _one_level_s(full_bytes / inside, nodes, network_link)


def all_to_all_s(rank_bytes: float, group: Group, node_link: Link, network_link: Link) -> float:
    """Each rank sends `rank_bytes` in equal parts to all ranks, itself included; levels work at the same time."""
    if group.ranks == 1 or rank_bytes <= 0:
        return 0.0
    inside = rank_bytes * (group.per_node - 1) / group.ranks
    across = rank_bytes * (group.ranks - group.per_node) / group.ranks
    return max(message_s(inside, node_link), message_s(across, network_link))


def message_s(bytes_sent: float, link: Link) -> float:
    """latency + bytes / bandwidth (the alpha-beta model, same paper, section 3)."""
    return link.latency_s + bytes_sent / link.reached_bytes_per_s if bytes_sent > 0 else 0.0


def _half_ring_s(full_bytes: float, ranks: int, link: Link) -> float:
    """Gather or reduce-scatter over one level."""
    return (ranks - 1) * (link.latency_s + full_bytes / ranks / link.reached_bytes_per_s)


def _one_level_s(full_bytes: float, ranks: int, link: Link) -> float:
    """All-reduce over one level by the fastest algorithm of its link."""
    if ranks == 1:
        return 0.0
    stream = full_bytes / link.reached_bytes_per_s
    found = [2 * _half_ring_s(full_bytes, ranks, link)]
    found.append(2 * math.ceil(math.log2(ranks)) * link.latency_s + 2 * stream / TREE_RATE)
    if link.nvls:
        found.append(NVLS_LATENCY_S + stream / NVLS_RATE)
    if link.sharp:
        found.append(SHARP_LATENCY_S + stream / SHARP_RATE)
    return min(found)
