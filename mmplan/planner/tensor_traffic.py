"""Bytes that the ranks of a tensor-parallel group sum in a step: what validation holds a run to."""

from collections.abc import Sequence

from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.load import Load, Loads
from mmplan.cost_models.local_layer import backward_sum_bytes, forward_sum_bytes, recomputed_sum_bytes
from mmplan.planner.plan import Plan
from mmplan.planner.program import Program
from mmplan.scenario.scenario import Dtype


def tensor_bytes(
    plan: Plan, graph: ComputationGraph, program: Program, loads: Sequence[Sequence[Loads]]
) -> tuple[int, ...]:
    """Of each listed rank. Args: loads: `[replica][microbatch]`."""
    precision = plan.scenario.precision
    totals = []
    for rank in program.ranks:
        stages = plan.stages_of(plan.row(rank.stage))
        layers = [(graph.layer(layer), plan.layout(stage)) for stage in stages for layer in plan.stages[stage].layers]
        totals.append(
            sum(
                _layer_bytes(layer, layout, microbatch[layer.module], precision)
                for layer, layout in layers
                for microbatch in loads[rank.replica]
            )
        )
    return tuple(totals)


def _layer_bytes(layer: Layer, layout: Layout, load: Load, precision: Dtype) -> int:
    tp = layout.shard(layer).tp
    summed = forward_sum_bytes(layer, load, precision, tp) + backward_sum_bytes(layer, load, precision, tp)
    return summed + (recomputed_sum_bytes(layer, load, precision, tp) if layout.recomputed(layer) == "full" else 0)
