"""Preparation of a placement problem: nodes that must or may as well share a device become one group, in integers.

Picoseconds rounded down, so that the optimum over integers is a proven bound; bytes rounded up, capacities down.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx

from mmplan.planner.partition.problem import PartitionProblem
from mmplan.planner.quantise import ceil_bytes, floor_bytes, floor_ns

PS_PER_NS = 1000
PS_PER_S = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Net:
    """An output and who holds it: `cost_ps` for each accelerator that has some of `groups` but not all."""

    groups: tuple[int, ...]
    cost_ps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupProblem:
    """The problem over groups in topological order; `members[g]`: nodes of group g.

    `accelerator_ps[g]` is 0 where `needs_cpu[g]`, `cpu_ps[g]` where `needs_accelerator[g]`. `capacity_bytes` of one
    accelerator is None when it holds everything.
    """

    members: tuple[tuple[int, ...], ...]
    accelerator_ps: tuple[int, ...]
    cpu_ps: tuple[int, ...]
    needs_cpu: tuple[bool, ...]
    needs_accelerator: tuple[bool, ...]
    size_bytes: tuple[int, ...]
    nets: tuple[Net, ...]
    edges: tuple[tuple[int, int], ...]
    accelerators: int
    cpus: int
    capacity_bytes: int | None

    @property
    def groups(self) -> int:
        return len(self.members)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlacement:
    """Stage of each group, which stages are CPUs, and the busiest load of the integer problem."""

    stage_of: tuple[int, ...]
    on_cpu: tuple[bool, ...]
    value_ps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAnswer:
    """The best placement that a solver found within its limits (None: none), and what no placement is below."""

    found: GroupPlacement | None
    bound_ps: int


def floor_ps(duration_s: float) -> int:
    """Whole picoseconds that are not more."""
    return floor_ns(PS_PER_NS * duration_s)


def group_nodes(problem: PartitionProblem) -> GroupProblem:
    """The same problem over groups: colours and cycles of the order joined, nodes that cost nothing put with their only
    neighbour. The optimum is the same.
    """
    group_of = _joined(problem)
    size_bytes = [ceil_bytes(size) for size in problem.size_bytes]
    roomy = sum(size_bytes) <= floor_bytes(problem.capacity_bytes)
    group_of = _with_free_nodes_absorbed(problem, group_of, roomy)
    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_nodes_from(sorted(set(group_of)))
    order.add_edges_from((group_of[u], group_of[v]) for u, v in problem.order if group_of[u] != group_of[v])
    rank = {group: index for index, group in enumerate(nx.lexicographical_topological_sort(order))}
    members: list[list[int]] = [[] for _ in rank]
    for node, group in enumerate(group_of):
        members[rank[group]].append(node)
    return GroupProblem(
        members=tuple(tuple(nodes) for nodes in members),
        accelerator_ps=tuple(_finite_ps(problem.accelerator_s[v] for v in nodes) for nodes in members),
        cpu_ps=tuple(_finite_ps(problem.cpu_s[v] for v in nodes) for nodes in members),
        needs_cpu=tuple(any(math.isinf(problem.accelerator_s[v]) for v in nodes) for nodes in members),
        needs_accelerator=tuple(any(math.isinf(problem.cpu_s[v]) for v in nodes) for nodes in members),
        size_bytes=tuple(sum(size_bytes[v] for v in nodes) for nodes in members),
        nets=_nets(problem, [rank[group] for group in group_of]),
        edges=tuple(sorted((rank[u], rank[v]) for u, v in nx.transitive_reduction(order).edges)),
        accelerators=problem.accelerators,
        cpus=problem.cpus,
        capacity_bytes=None if roomy else floor_bytes(problem.capacity_bytes),
    )


def _finite_ps(durations_s: Iterable[float]) -> int:
    durations = list(durations_s)
    return 0 if any(math.isinf(duration) for duration in durations) else sum(floor_ps(d) for d in durations)


def _joined(problem: PartitionProblem) -> list[int]:
    """Group of each node after joining colours, and then cycles of the order between colours."""
    first = {colour: node for node, colour in reversed(list(enumerate(problem.colour)))}
    group_of = [first[colour] for colour in problem.colour]
    order = nx.DiGraph([(group_of[u], group_of[v]) for u, v in problem.order])
    order.add_nodes_from(group_of)
    leader = {node: min(cycle) for cycle in nx.strongly_connected_components(order) for node in cycle}
    return [leader[group] for group in group_of]


def _with_free_nodes_absorbed(problem: PartitionProblem, group_of: list[int], roomy: bool) -> list[int]:
    """Groups without time (and bytes, unless all fits anywhere), with one neighbour in the order that also holds every
    output they hold, move to that neighbour: no device pays more, and the order stays possible.
    """
    merged = list(group_of)
    while True:
        near: dict[int, set[int]] = {group: set() for group in merged}
        beside: dict[int, list[set[int]]] = defaultdict(list)
        for u, v in problem.order:
            if merged[u] != merged[v]:
                near[merged[u]].add(merged[v])
                near[merged[v]].add(merged[u])
        for node, consumers in enumerate(problem.consumers):
            net = {merged[member] for member in (node, *consumers)}
            for group in net if len(net) > 1 else ():
                beside[group].append(net)
        costly = {
            merged[v]
            for v in range(problem.nodes)
            if problem.accelerator_s[v] or problem.cpu_s[v] or (problem.size_bytes[v] and not roomy)
        }
        target: dict[int, int] = {}
        for group in sorted(set(near) - costly):
            neighbour = min(near[group], default=group)
            if len(near[group]) == 1 and neighbour not in target and all(neighbour in net for net in beside[group]):
                target[group] = neighbour
        if not target:
            return merged
        merged = [target.get(group, group) for group in merged]


def _nets(problem: PartitionProblem, group_of: list[int]) -> tuple[Net, ...]:
    """Outputs that more than one group holds; those with the same holders are one."""
    cost_ps: dict[tuple[int, ...], int] = defaultdict(int)
    for node, consumers in enumerate(problem.consumers):
        holders = tuple(sorted({group_of[member] for member in (node, *consumers)}))
        if len(holders) > 1:
            cost_ps[holders] += floor_ps(problem.transfer_s[node])
    return tuple(Net(groups=groups, cost_ps=cost) for groups, cost in sorted(cost_ps.items()) if cost)
