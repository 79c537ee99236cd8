"""Rows that ranks of a stage have in parts and others of them need: by which way a plan hands them over, and what the
other way would take.

    gathered  all rows to every rank; with cp their gradient is summed over it
    placed    each row to the rank that has its place in the reader's sequence (`Layout.places`)
    strided   a projector joins or averages rows where they lie: each rank's part of the results is summed and dealt
              out, instead of gathering the rows in front of it
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.load import Load
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.strided import strided, strided_elements
from mmplan.planner.plan import Plan
from mmplan.scenario.scenario import DTYPE_BYTES

RowWay = Literal["gathered", "placed", "strided"]
ROW_WAYS: tuple[RowWay, ...] = get_args(RowWay)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowHandover:
    """Of a mean microbatch. `tensor`: whose rows; `moved_bytes`: of these on all ranks together, as they are handed
    over; `seconds`: there and, of their gradient, back."""

    tensor: str
    way: RowWay
    moved_bytes: int
    seconds: dict[RowWay, float]


def row_handovers(plan: Plan, graph: ComputationGraph, costs: CostModel) -> tuple[RowHandover, ...]:
    """In the order of stages and layers."""
    found: list[RowHandover] = []
    for stage, own in enumerate(plan.stages):
        layout = plan.layout(stage)
        if not layout.patches or layout.tp * layout.cp == 1:
            continue
        loads = mean_loads(plan.scenario, plan.samples(stage))
        for layer in map(graph.layer, own.layers):
            if layout.has_patches(layer):
                width = DTYPE_BYTES[plan.scenario.precision_of(layer)]
                found += _strided(graph, layer, layout, loads[layer.module], width, costs)
                found += _handed(layer, layout, loads[layer.module], width, costs)
    return tuple(found)


def _strided(
    graph: ComputationGraph, layer: Layer, layout: Layout, load: Load, width: int, costs: CostModel
) -> Iterator[RowHandover]:
    """Of a projector that makes one row of several."""
    for op in layer.ops:
        if not strided(op, layer):
            continue
        (source,) = layer.sources
        producer = graph.layer(source.producer)
        size = strided_elements(op, load, layout.shard(layer)) * width
        once_s, back = costs.make_whole_s(size, layout)[0], op.x.name in layer.grad_values
        apart = replace(layout, patches=tuple(name for name in layout.patches if name != layer.module))
        read_bytes = op.x.elements(load, Shard()) * width
        yield RowHandover(
            tensor=f"{producer.id}>{layer.id}",
            way="strided",
            moved_bytes=size,
            seconds={
                "gathered": _gathered_s(producer, apart, read_bytes, costs),
                "strided": once_s * (1 + back),
            },
        )


def _handed(layer: Layer, layout: Layout, load: Load, width: int, costs: CostModel) -> Iterator[RowHandover]:
    """To who reads all rows, or those at places of a sequence."""
    if not any(layout.handover(layer)):
        return
    size = layer.output.elements(load, Shard()) * width
    seconds: dict[RowWay, float] = {"gathered": _gathered_s(layer, layout, size, costs)}
    if layout.places(layer):
        seconds["placed"] = costs.place_rows_s(size, layout) * (1 + layer.has_backward)
    yield RowHandover(
        tensor=f"{layer.id}>{', '.join(layer.readers)}",
        way="placed" if layout.places(layer) else "gathered",
        moved_bytes=round(size),
        seconds=seconds,
    )


def _gathered_s(layer: Layer, layout: Layout, size: float, costs: CostModel) -> float:
    gather_s, both_s = costs.make_whole_s(size, layout)
    gathers, sums, joins = layout.handover(layer)
    return gathers * gather_s + (sums * (both_s - gather_s) + joins * gather_s if layer.has_backward else 0.0)
