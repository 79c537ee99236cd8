"""Features that frozen modules make a step ahead (`Plan.prefetch`): who holds how many bytes of them.

A stage of such modules runs microbatch j of the next step in place of this one's, and sends what it makes as ever; the
reader takes it once it has read microbatch j of this step, and keeps it. So at most one step of features waits at the
reader, and at most one where they are made for a reader that has not come to take them.
"""

from collections.abc import Callable, Iterable, Sequence

from mmplan.cost_models.graph import ComputationGraph, Edge
from mmplan.cost_models.load import Loads
from mmplan.planner.plan import Plan

CutEdges = Iterable[tuple[int, int, Edge]]  # source, target stage


def read_later(cut: CutEdges, ahead: Sequence[bool]) -> list[tuple[int, int, Edge]]:
    """Of cut edges one for each tensor that its reader gets a step ahead."""
    return list(
        {
            (edge.producer, target): (source, target, edge)
            for source, target, edge in cut
            if ahead[source] and not ahead[target]
        }.values()
    )


def features_bytes(cut: CutEdges, ahead: Sequence[bool], size_of: Callable[[Edge], int]) -> list[int]:
    """Of each stage; `size_of`: of a tensor in all microbatches of a step."""
    held = [0] * len(ahead)
    for source, target, edge in read_later(cut, ahead):
        size = size_of(edge)
        held[source] += size
        held[target] += size
    return held


def plan_features_bytes(plan: Plan, graph: ComputationGraph, loads: Sequence[Loads]) -> list[int]:
    """Of each stage in a replica with these microbatches."""
    if not plan.prefetch:
        return [0] * len(plan.stages)
    stage_of, ahead = plan.stage_of_layer(), [plan.is_ahead(stage) for stage in range(len(plan.stages))]
    cut = ((stage_of[edge.producer], stage_of[edge.consumer], edge) for edge in graph.edges())

    def size_of(edge: Edge) -> int:
        layout = plan.layout(stage_of[edge.producer])
        return sum(layout.sent_bytes(edge, graph, load, plan.scenario) for load in loads)

    return features_bytes(cut, ahead, size_of)
