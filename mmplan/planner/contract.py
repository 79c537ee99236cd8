"""Groups of layers that no cut may separate: no-split zones, edges that cannot be cut, and cycles these would cause.

Every edge that touches a layer of a zone stays inside one stage, so the layer and its neighbours are one group. Groups
that then lie on a common cycle must share a stage too, or stages would wait for each other.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import networkx as nx

from mmplan.cost_models.graph import ComputationGraph, Edge


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupGraph:
    """Layer ids of each group in topological order, groups numbered in topological order; `edges` run between groups.

    `ends[i]` are the producing and the consuming group of `edges[i]`.
    """

    groups: tuple[tuple[str, ...], ...]
    edges: tuple[Edge, ...]
    ends: tuple[tuple[int, int], ...]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Each pair of groups that an edge joins, once."""
        return tuple(sorted(set(self.ends)))


def contract(graph: ComputationGraph, no_split: tuple[str, ...]) -> GroupGraph:
    """The groups of a layer graph under no-split zones."""
    zone = set(no_split)
    together = [
        (edge.producer, edge.consumer)
        for edge in graph.edges()
        if not edge.cuttable or edge.producer in zone or edge.consumer in zone
    ]
    return _grouped(graph, together)


def merge_chains(
    graph: ComputationGraph, groups: GroupGraph, chains: Sequence[Sequence[int]], kept: Sequence[Collection[int]]
) -> GroupGraph:
    """Neighbours in chains merged: fewer groups, fewer upsets, and every cut is a cut of `groups` as well.

    Args:
        chains: groups in rows, see `stage_order.chains`.
        kept: per chain, the positions in front of which it may still be cut.
    """
    together = [(members[0], layer) for members in groups.groups for layer in members[1:]]
    for chain, places in zip(chains, kept, strict=True):
        for place in range(1, len(chain)):
            if place not in places:
                together.append((groups.groups[chain[place - 1]][0], groups.groups[chain[place]][0]))
    return _grouped(graph, together)


def _grouped(graph: ComputationGraph, pairs: list[tuple[str, str]]) -> GroupGraph:
    """Groups that keep the layers of each pair together, and no cycle apart."""
    order = {layer.id: index for index, layer in enumerate(graph.layers())}
    together: nx.Graph[str] = nx.Graph()
    together.add_nodes_from(order)
    together.add_edges_from(pairs)
    merged = {layer: index for index, layers in enumerate(nx.connected_components(together)) for layer in layers}
    quotient: nx.DiGraph[int] = nx.DiGraph()
    quotient.add_nodes_from(merged.values())
    quotient.add_edges_from((merged[edge.producer], merged[edge.consumer]) for edge in graph.edges())
    quotient.remove_edges_from(list(nx.selfloop_edges(quotient)))
    cycle_of = {node: index for index, nodes in enumerate(nx.strongly_connected_components(quotient)) for node in nodes}
    members: dict[int, list[str]] = {}
    for layer in order:
        members.setdefault(cycle_of[merged[layer]], []).append(layer)
    acyclic: nx.DiGraph[int] = nx.DiGraph()
    acyclic.add_nodes_from(members)
    acyclic.add_edges_from((cycle_of[a], cycle_of[b]) for a, b in quotient.edges() if cycle_of[a] != cycle_of[b])
    ranked = nx.lexicographical_topological_sort(acyclic, key=lambda group: order[members[group][0]])
    groups = tuple(tuple(members[group]) for group in ranked)
    group_of = {layer: index for index, layers in enumerate(groups) for layer in layers}
    crossing = tuple(edge for edge in graph.edges() if group_of[edge.producer] != group_of[edge.consumer])
    ends = tuple((group_of[edge.producer], group_of[edge.consumer]) for edge in crossing)
    return GroupGraph(groups=groups, edges=crossing, ends=ends)
