"""The DAG of a plan's stages, read off the layer edges that the cut crosses."""

from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.cost_models.graph import ComputationGraph, Edge
from mmplan.errors import CheckError


@dataclass(frozen=True, kw_only=True, slots=True)
class CutTensor:
    """One layer's output on its way to one other stage, which gets it once however many of its layers read it.

    `edge` is the layer edge to the stage's first reader in topological order; `carries_grad` tells whether the
    gradient comes back.
    """

    edge: Edge
    source: int
    target: int
    carries_grad: bool

    @property
    def activation(self) -> str:
        """Name of the activation in a program: `producer>consumer`."""
        return f"{self.edge.producer}>{self.edge.consumer}"

    @property
    def gradient(self) -> str:
        """Name of its gradient: `producer<consumer`."""
        return f"{self.edge.producer}<{self.edge.consumer}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageGraph:
    """Stages by index. `order` is topological; `depths[s]` counts the stages on the longest path from `s` to a sink."""

    successors: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    depths: tuple[int, ...]
    has_backward: tuple[bool, ...]
    cuts: tuple[CutTensor, ...]


def build_stage_graph(stages: Sequence[Sequence[str]], graph: ComputationGraph) -> StageGraph:
    """The stage DAG of a cut.

    Args:
        stages: layer ids of each stage; together they hold every layer of `graph` once.

    Raises:
        CheckError: a layer is in no stage, or the stages form a cycle.
    """
    stage_of = {layer: index for index, layers in enumerate(stages) for layer in layers}
    missing = [layer.id for layer in graph.layers() if layer.id not in stage_of]
    if missing:
        raise CheckError(f"layer {missing[0]} is in no stage ({len(missing)} such layers)")
    cuts = _cut_tensors(stage_of, graph)
    successors = tuple(
        tuple(sorted({cut.target for cut in cuts if cut.source == stage})) for stage in range(len(stages))
    )
    order = _topological(successors)
    depths = [1] * len(stages)
    for stage in reversed(order):
        depths[stage] = 1 + max((depths[target] for target in successors[stage]), default=0)
    backward = {stage_of[layer.id] for layer in graph.layers() if layer.has_backward}
    return StageGraph(
        successors=successors,
        order=order,
        depths=tuple(depths),
        has_backward=tuple(stage in backward for stage in range(len(stages))),
        cuts=cuts,
    )


def _cut_tensors(stage_of: dict[str, int], graph: ComputationGraph) -> tuple[CutTensor, ...]:
    """In the topological order of producers, then of first consumers."""
    position = {layer.id: index for index, layer in enumerate(graph.layers())}
    by_tensor: dict[tuple[str, int], list[Edge]] = {}
    for edge in sorted(graph.edges(), key=lambda edge: (position[edge.producer], position[edge.consumer])):
        target = stage_of[edge.consumer]
        if target != stage_of[edge.producer]:
            by_tensor.setdefault((edge.producer, target), []).append(edge)
    return tuple(
        CutTensor(
            edge=edges[0],
            source=stage_of[producer],
            target=target,
            carries_grad=any(edge.carries_grad for edge in edges),
        )
        for (producer, target), edges in by_tensor.items()
    )


def _topological(successors: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Smallest ready stage first; CheckError names the stages of a cycle."""
    waits_for = [0] * len(successors)
    for targets in successors:
        for target in targets:
            waits_for[target] += 1
    ready = sorted(stage for stage, count in enumerate(waits_for) if count == 0)
    order: list[int] = []
    while ready:
        stage = ready.pop(0)
        order.append(stage)
        for target in successors[stage]:
            waits_for[target] -= 1
            if waits_for[target] == 0:
                ready = sorted([*ready, target])
    if len(order) < len(successors):
        stuck = sorted(set(range(len(successors))) - set(order))
        raise CheckError(f"stages {', '.join(map(str, stuck))} wait for each other: the cut is not acyclic")
    return tuple(order)
