"""Bytes that ranks which share layers exchange in a step, sums and rows for experts: what validation holds a run to."""

from mmplan.cost_models.graph import ComputationGraph
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
        )
    return tuple(totals)


def _layer_bytes(layer: Layer, layout: Layout, load: Load, precision: Dtype) -> int:
    shard = layout.shard(layer)
    summed = forward_sum_bytes(layer, load, precision, shard) + backward_sum_bytes(layer, load, precision, shard)
    return summed + (recomputed_sum_bytes(layer, load, precision, shard) if layout.recomputed(layer) == "full" else 0)
