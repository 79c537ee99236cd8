"""Seconds of collectives: alpha-beta by algorithm, message size and network level; the fastest algorithm is taken.

A tensor of B bytes over n ranks of one level, with latency a and rate b of its link, takes

    ring    gather or reduce-scatter (n - 1) a + (n - 1) / n B / b, all-reduce both (Thakur, Rabenseifner, Gropp,
            IJHPCA 2005, sections 4.1 and 4.5; NCCL all-gathers by rings only)
    tree    all-reduce 2 log2(n) a + 2 B / (0.92 b): a double binary tree (Sanders, Speck, Traeff, Parallel Computing
            35, 2009) at NCCL's share of the ring's rate (src/graph/tuning.cc)
    tree    broadcast log2(n) (a + B / b), or a scatter and a ring (log2(n) + n - 1) a + 2 (n - 1) / n B / b (Thakur et
            al., section 4.2)
    switch  all-reduce s + B / (r b): the switch adds, each rank sends and receives B once (Klenk et al., ISCA 2020).
            NVLS inside a node, SHARP across nodes, where the link says so (`Link.nvls`, `Link.sharp`)

Across nodes a collective is a reduction inside each node, one exchange over the nodes for each rank of the group in a
node, and a gather inside; `Link.bytes_per_s` is one device's share of its node's network ports, so a group with r ranks
in a node has r shares, and groups in one node share it fairly. The network is taken to be rail-optimised: equal ranks
of all nodes hang on one switch, and what is for another rail changes it inside the node first (NCCL 2.12, PXN), so
rings and all-to-alls stay on their rail; `Link.oversubscription` is for networks that are not.

With `Link.pipelined` on the network the levels stream at the same time, as in NCCL's rings and trees through all nodes:
latencies add up, of the streams the slower one counts, and NVLS may add inside the nodes (NCCL 2.18, NVLSTree). Gathers
then are rings through all n ranks, one for each rank of a node: through each port go (n - 1) / n of what its ring
carries, where an exchange over m nodes sends (m - 1) / m. So are all-reduces with `Link.rings`. With
`Link.direct_peers` p on the node link a group of n ranks reaches (n - 1) / p of the rate.
"""

import math
from collections.abc import Sequence
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
    inside = _half_ring(full_bytes, group.per_node, node_link)
    across = _half_ring(full_bytes / group.per_node, group.nodes, network_link)
    if network_link.pipelined:
        across = _through_all_ranks(across, group)
    return _both_levels_s([inside], [across], network_link)


def all_reduce_s(full_bytes: float, group: Group, node_link: Link, network_link: Link) -> float:
    """All-reduce of a tensor of `full_bytes` on every rank."""
    if group.ranks == 1 or full_bytes <= 0:
        return 0.0
    inside, nodes = group.per_node, group.nodes
    if nodes == 1:
        return min(map(_total_s, _one_level(full_bytes, inside, node_link)))
    rings = [_ring(full_bytes, inside, node_link)]
    if node_link.nvls and network_link.pipelined and inside > 1:
        rings.append(_switched(full_bytes, node_link))
    across = _one_level(full_bytes / inside, nodes, network_link)
    if network_link.pipelined and network_link.rings:
        across[0] = _through_all_ranks(across[0], group)
    return _both_levels_s(rings, across, network_link)


def broadcast_s(full_bytes: float, group: Group, node_link: Link, network_link: Link) -> float:
    """One rank's tensor of `full_bytes` to all others, first to one of each node, then inside."""
    if group.ranks == 1 or full_bytes <= 0:
        return 0.0
    levels = (group.nodes, network_link), (group.per_node, node_link)
    return sum(_broadcast_one_level_s(full_bytes, ranks, link) for ranks, link in levels)


def all_to_all_s(rank_bytes: float, group: Group, node_link: Link, network_link: Link) -> float:
    """Each rank sends `rank_bytes` in equal parts to all ranks, itself included; levels work at the same time."""
    if group.ranks == 1 or rank_bytes <= 0:
        return 0.0
    near, far = group.per_node - 1, group.ranks - group.per_node
    inside = _spread_s(rank_bytes * near / group.ranks, near, node_link)
    return max(inside, _spread_s(rank_bytes * far / group.ranks, far, network_link))


def message_s(bytes_sent: float, link: Link) -> float:
    """latency + bytes / bandwidth (the alpha-beta model, same paper, section 3)."""
    return link.latency_s + bytes_sent / link.group_bytes_per_s(2) if bytes_sent > 0 else 0.0


def _spread_s(bytes_sent: float, peers: int, link: Link) -> float:
    """Messages to `peers` other ranks at a time."""
    return link.latency_s + bytes_sent / link.group_bytes_per_s(peers + 1) if bytes_sent > 0 else 0.0


_Cost = tuple[float, float]  # of one level: seconds of latency, seconds of streaming


def _broadcast_one_level_s(full_bytes: float, ranks: int, link: Link) -> float:
    if ranks == 1:
        return 0.0
    rounds = math.ceil(math.log2(ranks))
    tree_s = rounds * (link.latency_s + full_bytes / link.group_bytes_per_s(2))
    stream_s = 2 * (ranks - 1) / ranks * full_bytes / link.group_bytes_per_s(ranks)
    return min(tree_s, (rounds + ranks - 1) * link.latency_s + stream_s)


def _total_s(cost: _Cost) -> float:
    return cost[0] + cost[1]


def _both_levels_s(inside: Sequence[_Cost], across: Sequence[_Cost], network_link: Link) -> float:
    """One level after the other, or both at a time."""
    if not network_link.pipelined:
        return min(map(_total_s, inside)) + min(map(_total_s, across))
    return min(near[0] + far[0] + max(near[1], far[1]) for near in inside for far in across)


def _half_ring(full_bytes: float, ranks: int, link: Link) -> _Cost:
    """Gather or reduce-scatter over one level."""
    if ranks == 1:
        return 0.0, 0.0
    return (ranks - 1) * link.latency_s, (ranks - 1) * (full_bytes / ranks / link.group_bytes_per_s(ranks))


def _ring(full_bytes: float, ranks: int, link: Link) -> _Cost:
    latency_s, stream_s = _half_ring(full_bytes, ranks, link)
    return 2 * latency_s, 2 * stream_s


def _through_all_ranks(over_nodes: _Cost, group: Group) -> _Cost:
    """A ring over m nodes as part of a ring through all n ranks: (n - 1) / n of the bytes instead of (m - 1) / m."""
    latency_s, stream_s = over_nodes
    more = 1.0 if group.nodes == 1 else (1 - 1 / group.ranks) / (1 - 1 / group.nodes)
    return latency_s, stream_s * more


def _switched(full_bytes: float, link: Link) -> _Cost:
    return NVLS_LATENCY_S, full_bytes / link.reached_bytes_per_s / NVLS_RATE


def _one_level(full_bytes: float, ranks: int, link: Link) -> list[_Cost]:
    """All-reduce over one level by each algorithm of its link."""
    if ranks == 1:
        return [(0.0, 0.0)]
    stream_s = full_bytes / link.group_bytes_per_s(ranks)
    found = [_ring(full_bytes, ranks, link)]
    found.append((2 * math.ceil(math.log2(ranks)) * link.latency_s, 2 * stream_s / TREE_RATE))
    if link.nvls:
        found.append(_switched(full_bytes, link))
    if link.sharp:
        found.append((SHARP_LATENCY_S, stream_s / SHARP_RATE))
    return found
