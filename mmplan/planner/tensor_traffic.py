"""Bytes that ranks which share layers exchange in a step, sums and rows for experts: what validation holds a run to."""

from mmplan.cost_models.counts import edge_bytes
from mmplan.cost_models.graph import ComputationGraph, Edge
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.load import Load, Loads
from mmplan.cost_models.local_layer import backward_sum_bytes, forward_sum_bytes, recomputed_sum_bytes
from mmplan.cost_models.values import rows_of_context_rank
from mmplan.planner.plan import Plan
from mmplan.planner.program import Program
from mmplan.planner.step_loads import StageLoads, StepLoads
from mmplan.scenario.scenario import DTYPE_BYTES, Dtype


def tensor_bytes(plan: Plan, graph: ComputationGraph, program: Program, loads: StepLoads) -> tuple[int, ...]:
    """Of each listed rank. Args: loads: [part][microbatch]."""
    precision, seen = plan.scenario.precision, StageLoads(plan, loads)
    totals = []
    for rank in program.ranks:
        stages = plan.stages_of(plan.row(rank.stage))
        totals.append(
            sum(
                _layer_bytes(layer, plan.layout(stage), microbatch[layer.module], precision)
                for stage in stages
                for layer in map(graph.layer, plan.stages[stage].layers)
                for microbatch in seen.of_stage(stage)[rank.replica]
            )
            + sum(
                _whole_bytes(edge, microbatch, precision, over)
                for stage in stages
                for edge, over in _gathered(plan, graph, stage)
                for microbatch in seen.of_stage(stage)[rank.replica]
            )
        )
    return tuple(totals)


def _layer_bytes(layer: Layer, layout: Layout, load: Load, precision: Dtype) -> int:
    shard = layout.shard(layer)
    summed = forward_sum_bytes(layer, load, precision, shard) + backward_sum_bytes(layer, load, precision, shard)
    return summed + (recomputed_sum_bytes(layer, load, precision, shard) if layout.recomputed(layer) == "full" else 0)


def _whole_bytes(edge: Edge, loads: Loads, precision: Dtype, over: int) -> int:
    """Of all rows; of those that `over` ranks have in equal parts, with what fills these up."""
    if over == 1:
        return edge_bytes(edge, loads, precision)
    rows: float = getattr(loads[edge.load_module], edge.load_field)
    return edge.width * over * rows_of_context_rank(rows, over) * DTYPE_BYTES[precision]


def _gathered(plan: Plan, graph: ComputationGraph, stage: int) -> list[tuple[Edge, int]]:
    """Tensors that ranks have in parts and make whole, each with the ranks over which its rows are cut (1: images or
    clips are dealt out): for who wants all rows or other parts of them, once in a forward; of what layers read by
    images of others, the gradient. With cp the gradient of those with readers that want all is summed over it. One edge
    for each tensor and time."""
    if plan.width == 1 or not plan.spread:
        return []
    here, layout = set(plan.stages[stage].layers), plan.layout(stage)

    def way(name: str) -> str:
        layer = graph.layer(name)
        if layer.module in plan.patches:
            return "rows" if layout.has_patches(layer) else ""
        return "images" if name in here and layer.module in plan.spread else ""

    edges = [edge for edge in graph.edges() if {edge.producer, edge.consumer} & here]
    own = [edge for edge in edges if edge.producer in here and way(edge.producer)]
    outputs = {edge.producer: edge for edge in own if way(edge.consumer) != way(edge.producer)}
    summed = {edge.producer: edge for edge in own if not way(edge.consumer) and edge.carries_grad and plan.cp > 1}
    inputs = {
        edge.producer: edge
        for edge in edges
        if way(edge.consumer) == "images" != way(edge.producer) and edge.carries_grad
    }
    gathers = [(edge, plan.width if way(edge.producer) == "rows" else 1) for edge in outputs.values()]
    return [*gathers, *((edge, 1) for edge in (*inputs.values(), *summed.values()))]
