"""Bytes that ranks which share layers exchange in a step: sums, rows for experts, slices that came from other meshes.
What validation holds a run to.
"""

from dataclasses import replace

from mmplan.cost_models.counts import edge_bytes
from mmplan.cost_models.graph import ComputationGraph, Edge
from mmplan.cost_models.layer import Layer, splits_rows
from mmplan.cost_models.layout import Layout, attention_way
from mmplan.cost_models.load import Load, Loads
from mmplan.cost_models.local_layer import (
    attention_again_bytes,
    backward_sum_bytes,
    forward_sum_bytes,
    recomputed_sum_bytes,
)
from mmplan.cost_models.values import rows_of_context_rank
from mmplan.planner.border import SHARED
from mmplan.planner.mesh import message_bytes, slices
from mmplan.planner.plan import Plan
from mmplan.planner.program import Program
from mmplan.planner.stage_graph import CutTensor, build_stage_graph
from mmplan.planner.step_loads import StageLoads, StepLoads
from mmplan.scenario.scenario import DTYPE_BYTES, Dtype

_AGAIN = {"full": recomputed_sum_bytes, "selective": attention_again_bytes}


def tensor_bytes(plan: Plan, graph: ComputationGraph, program: Program, loads: StepLoads) -> tuple[int, ...]:
    """Of each listed rank. Args: loads: [part][microbatch]."""
    scenario, seen = plan.scenario, StageLoads(plan, loads)
    cuts, totals = build_stage_graph([stage.layers for stage in plan.stages], graph).cuts, []
    for rank in program.ranks:
        total = 0
        for stage in plan.stages_of(plan.row(rank.stage)):
            layers, layout = [graph.layer(layer) for layer in plan.stages[stage].layers], plan.layout(stage)
            gathered = _gathered(plan, graph, stage)
            for microbatch in range(plan.microbatches):
                load = seen.of_compute(stage, rank.replica, "F", microbatch)
                total += sum(_layer_bytes(plan, la, layout, load[la.module]) for la in layers if la.module in load)
                total += sum(
                    _whole_bytes(edge, load, scenario.precision_of(edge), over, of)
                    for edge, over, of in gathered
                    if edge.load_module in load
                )
            total += sum(_border_bytes(plan, cut, stage, seen, rank.replica) for cut in cuts)
        totals.append(total)
    return tuple(totals)


def _border_bytes(plan: Plan, cut: CutTensor, stage: int, seen: StageLoads, replica: int) -> int:
    """Of a tensor between two meshes and its gradient in a step, on a rank of a replica of one of its stages: what cp
    ranks of the reader join, and over tp what who reads it gets, and of the gradient who made it."""
    border = plan.border(cut.activation, cut.source, cut.target)
    if stage not in (cut.source, cut.target) or border.source == border.target:
        return 0
    own, other = (border.target, border.source) if stage == cut.target else (border.source, border.target)
    ways = cut.carries_grad if stage == cut.source else 1 + cut.carries_grad
    joined = (1 if border.way == "placed" else own.cp) * ways if stage == cut.target and own.cp > 1 else 0
    shared = 1 if border.way in SHARED and own.tp > 1 and ways else 0
    if not joined + shared:
        return 0
    parts = seen.of_overlaps(own, replica, other)
    precision = plan.scenario.precision_of(cut.edge)
    messages = (message_bytes(cut.edge, load, precision, *border.seen) for row in parts for load in row)
    return sum(messages) * slices(*border.seen) // own.cp * (joined + shared)


def _layer_bytes(plan: Plan, layer: Layer, layout: Layout, load: Load) -> int:
    precision, technique = plan.scenario.precision_of(layer), plan.scenario.technique
    sequence = technique.sequence_parallel and splits_rows(layer)
    way = attention_way(layer, technique.context_parallel)
    shard = replace(layout.shard(layer), context_parallel=way, sequence=sequence)
    summed = forward_sum_bytes(layer, load, precision, shard) + backward_sum_bytes(layer, load, precision, shard)
    again = _AGAIN.get(layout.recomputed(layer))
    return summed + (0 if again is None else again(layer, load, precision, shard))


def _whole_bytes(edge: Edge, loads: Loads, precision: Dtype, over: int, of: int) -> int:
    """Of all rows; of those that `over` ranks have in equal parts what `of` of them have, with what fills these up."""
    if over == 1:
        return edge_bytes(edge, loads, precision)
    rows: float = getattr(loads[edge.load_module], edge.load_field)
    return edge.width * of * rows_of_context_rank(rows, over) * DTYPE_BYTES[precision]


def _gathered(plan: Plan, graph: ComputationGraph, stage: int) -> list[tuple[Edge, int, int]]:
    """Tensors that ranks have in parts and make whole, each with the ranks over which its rows are cut (1: images or
    clips are dealt out): for who wants all rows or other parts of them, once in a forward; of what layers read by
    images of others, the gradient. With cp the gradient of those with readers that want all is summed over it. Of rows
    that go to who needs them alone each rank gives those that it has. One edge for each tensor and time, with the ranks
    whose rows count."""
    here, layout, width = set(plan.stages[stage].layers), plan.layout(stage), plan.mesh(stage).width
    if width == 1 or not layout.spread:
        return []

    def way(name: str) -> str:
        layer = graph.layer(name)
        if layer.module in layout.patches:
            return "rows" if layout.has_patches(layer) else ""
        return "images" if name in here and layer.module in layout.spread else ""

    edges = [edge for edge in graph.edges() if {edge.producer, edge.consumer} & here]
    own = [edge for edge in edges if edge.producer in here and way(edge.producer)]
    outputs = {edge.producer: edge for edge in own if way(edge.consumer) != way(edge.producer)}
    summed = {edge.producer: edge for edge in own if not way(edge.consumer) and edge.carries_grad and layout.cp > 1}
    inputs = {
        edge.producer: edge
        for edge in edges
        if way(edge.consumer) == "images" != way(edge.producer) and edge.carries_grad
    }
    moved = {name for name in outputs if layout.places(graph.layer(name))}
    whole = [edge for name, edge in outputs.items() if name not in moved]
    gathers = [(edge, width if way(edge.producer) == "rows" else 1, width) for edge in whole]
    sums = [edge for name, edge in summed.items() if name not in moved]
    places = [(edge, width, 1) for name in moved for edge in (outputs[name],) * (1 + outputs[name].carries_grad)]
    return [*gathers, *places, *((edge, 1, 1) for edge in (*inputs.values(), *sums))]
