"""The computation graph: layers and the tensors between them, in one fixed topological order."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import networkx as nx

from mmplan.cost_models.layer import Layer
from mmplan.scenario.scenario import Dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """An activation [rows, width] from one layer to another; rows = getattr(loads[load_module], load_field).

    `carries_grad`: the producer wants its gradient back. `cuttable` is False where a pipeline cut makes no sense
    (logits to loss). `precision`: as of the producer's module; a reader of another precision casts what it gets.
    `placed`: where there is one reader, and all that it does with the rows is to put them at places of its sequence,
    which only ranks with these places need, the key of the places in a microbatch.
    """

    producer: str
    consumer: str
    width: int
    load_module: str
    load_field: Literal["tokens", "outputs"]
    carries_grad: bool
    cuttable: bool = True
    precision: Dtype | None = None
    placed: str = ""

    @property
    def name(self) -> str:
        return f"{self.producer}>{self.consumer}"


class ComputationGraph:
    """One directed acyclic graph over `Layer` and `Edge` values.

    Args:
        layers: in an order that breaks ties of the topological order.
        edges: between ids of these layers.

    Raises:
        ValueError: an edge names an unknown layer, or the graph has a cycle.
    """

    def __init__(self, layers: Iterable[Layer], edges: Iterable[Edge]) -> None:
        self._graph: nx.DiGraph[str] = nx.DiGraph()
        self._layers = {layer.id: layer for layer in layers}
        self._edges = {(edge.producer, edge.consumer): edge for edge in edges}
        self._graph.add_nodes_from(self._layers)
        for producer, consumer in self._edges:
            if producer not in self._layers or consumer not in self._layers:
                raise ValueError(f"edge {producer}>{consumer} names an unknown layer")
            self._graph.add_edge(producer, consumer)
        if not nx.is_directed_acyclic_graph(self._graph):
            raise ValueError(f"the graph has a cycle: {nx.find_cycle(self._graph)}")
        position = {layer: index for index, layer in enumerate(self._layers)}
        self._order = tuple(nx.lexicographical_topological_sort(self._graph, key=position.__getitem__))

    def layers(self) -> tuple[Layer, ...]:
        """All layers in topological order."""
        return tuple(self._layers[layer] for layer in self._order)

    def layer(self, layer_id: str) -> Layer:
        """The layer of that id; KeyError when there is none."""
        return self._layers[layer_id]

    def edges(self) -> tuple[Edge, ...]:
        """All edges, by producer then consumer in topological order."""
        return tuple(self._edges[u, v] for u in self._order for v in self.successors(u))

    def edge(self, producer: str, consumer: str) -> Edge:
        """The edge between two layers; KeyError when there is none."""
        return self._edges[producer, consumer]

    def predecessors(self, layer_id: str) -> tuple[str, ...]:
        """Ids of the layers that feed a layer, in the order their edges were given."""
        return tuple(self._graph.predecessors(layer_id))

    def successors(self, layer_id: str) -> tuple[str, ...]:
        """Ids of the layers that a layer feeds, in the order their edges were given."""
        return tuple(self._graph.successors(layer_id))
