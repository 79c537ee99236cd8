"""Bytes that ranks which share layers exchange in a step, sums and rows for experts: what validation holds a run to."""

from mmplan.cost_models.counts import edge_bytes
from mmplan.cost_models.graph import ComputationGraph, Edge
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.load import Load
from mmplan.cost_models.local_layer import backward_sum_bytes, forward_sum_bytes, recomputed_sum_bytes
from mmplan.planner.plan import Plan
from mmplan.planner.program import Program
from mmplan.planner.step_loads import StageLoads, StepLoads
from mmplan.scenario.scenario import Dtype


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
                edge_bytes(edge, microbatch, precision)
                for stage in stages
                for edge in _gathered(plan, graph, stage)
                for microbatch in seen.of_stage(stage)[rank.replica]
            )
        )
    return tuple(totals)


def _layer_bytes(layer: Layer, layout: Layout, load: Load, precision: Dtype) -> int:
    shard = layout.shard(layer)
    summed = forward_sum_bytes(layer, load, precision, shard) + backward_sum_bytes(layer, load, precision, shard)
    return summed + (recomputed_sum_bytes(layer, load, precision, shard) if layout.recomputed(layer) == "full" else 0)


def _gathered(plan: Plan, graph: ComputationGraph, stage: int) -> list[Edge]:
    """Tensors that ranks have in parts, because they take images or clips of a module in turn, and make whole: for who
    has all rows, once in a forward; of what such a module reads of others, the gradient. With cp the gradient of the
    first is summed over it. One edge for each tensor and time."""
    if plan.width == 1 or not plan.spread:
        return []
    here = set(plan.stages[stage].layers)
    parts = {name for name in here if graph.layer(name).module in plan.spread}
    edges = [edge for edge in graph.edges() if {edge.producer, edge.consumer} & here]
    outputs = {e.producer: e for e in edges if e.producer in parts and e.consumer not in parts}
    inputs = {e.producer: e for e in edges if e.producer not in parts and e.consumer in parts and e.carries_grad}
    summed = [edge for edge in outputs.values() if edge.carries_grad] if plan.cp > 1 else []
    return [*outputs.values(), *inputs.values(), *summed]
