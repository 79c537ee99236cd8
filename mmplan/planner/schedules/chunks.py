"""A plan cut anew into several chunks per rank, laid round the ranks or down and up them, for families that need it.

Layers keep their topological order and are split where the slowest chunk is least, over all contiguous splits; groups
that no cut may separate stay whole.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.loads import mean_loads
from mmplan.planner.contract import contract
from mmplan.planner.durations import replicas_per_node
from mmplan.planner.lower import stage_trained
from mmplan.planner.plan import Certificate, Plan, StagePlan
from mmplan.planner.problem import devices_per_node
from mmplan.planner.schedules.problem import NotApplicable
from mmplan.planner.ties import share_bytes, tie_seconds, tied_tables

# The closed form is one of stages with a rank each: nothing is claimed of several.
GIVEN = Certificate(objective_s=0.0, bound_s=0.0, gap=1.0, status="given", wall_s=0.0)


def chunked_plan(
    plan: Plan, graph: ComputationGraph, costs: CostModel, chunks: int, *, v_shaped: bool
) -> Plan | NotApplicable:
    """The plan with `chunks` stages per rank; memory and in-flight numbers are those of a schedule to come."""
    if plan.meshes:
        return NotApplicable("modules of the plan have ranks of their own, and chunks go round the ranks of all")
    groups = contract(graph, plan.scenario.constraints.no_split).groups
    count, p = plan.pp * chunks, plan.pp
    if len(groups) < count:
        return NotApplicable(f"{count} chunks need as many groups of layers, the model has {len(groups)}")
    loads, layout = mean_loads(plan.scenario, plan.microbatch_size), plan.layout(0)
    if any(stage.recompute != layout.recompute for stage in plan.stages):
        return NotApplicable("the plan's stages recompute differently, and chunks have no stage of their own to follow")

    def seconds(layers: tuple[str, ...]) -> tuple[float, float]:
        known = [graph.layer(layer) for layer in layers]
        forward_s = sum(costs.forward_s(layer, loads[layer.module], layout) for layer in known)
        return forward_s, sum(costs.backward_s(layer, loads[layer.module], layout) for layer in known)

    ends = balanced_ends([sum(seconds(group)) for group in groups], count)
    order = {layer.id: place for place, layer in enumerate(graph.layers())}
    places = [index % p if not v_shaped or index // p % 2 == 0 else p - 1 - index % p for index in range(count)]
    stages: list[StagePlan] = []
    for first, last in zip([0, *ends], ends, strict=False):
        layers = tuple(sorted((x for group in groups[first:last] for x in group), key=order.__getitem__))
        forward_s, backward_s = seconds(layers)
        row = places[len(stages)]
        stages.append(replace(_stage_of_row(plan, row), layers=layers, forward_s=forward_s, backward_s=backward_s))
    made = replace(plan, stages=tuple(stages), placement=tuple(places), orders=(), schedule_certificate=None)
    return replace(made, certificate=GIVEN, stages=_with_finish(made, graph, costs))


def _with_finish(plan: Plan, graph: ComputationGraph, costs: CostModel) -> tuple[StagePlan, ...]:
    """Stages with the seconds of their own reduction and update."""
    together = min(replicas_per_node(plan, stage) for stage in range(len(plan.stages)))
    near = plan.world <= devices_per_node(plan.scenario.cluster)
    stages = []
    for index, stage in enumerate(plan.stages):
        trained, layout = stage_trained(plan, graph, index), plan.layout(index)
        finish_s = costs.reduce_s(trained, layout, together) + costs.update_s(trained, layout)
        finish_s += sum(
            tie_seconds(costs, share_bytes(plan, graph, tied), 2, near)
            for tied in tied_tables(plan, graph)
            if index in tied.stages
        )
        stages.append(replace(stage, finish_s=finish_s if trained.total else 0.0))
    return tuple(stages)


def _stage_of_row(plan: Plan, row: int) -> StagePlan:
    return plan.stages[plan.stages_of(row)[0]]


def balanced_ends(seconds: list[float], parts: int) -> list[int]:
    """Ends of `parts` contiguous parts whose slowest is least; of those, whose squares add up to least."""
    total = [0.0, *accumulate(seconds)]
    ends, slowest_s = _least(total, parts, lambda before, part_s: max(before, part_s))
    limit_s = slowest_s * (1 + 1e-9)
    squares = _least(total, parts, lambda before, part_s: before + part_s**2 if part_s <= limit_s else float("inf"))
    return squares[0] if squares[1] < float("inf") else ends


def _least(total: list[float], parts: int, add: Callable[[float, float], float]) -> tuple[list[int], float]:
    """Ends of `parts` contiguous parts whose value is least, and that value; `total`: sums from the start."""
    count = len(total) - 1
    least = [[float("inf")] * (count + 1) for _ in range(parts + 1)]
    cut = [[0] * (count + 1) for _ in range(parts + 1)]
    least[0][0] = 0.0
    for part in range(1, parts + 1):
        for end in range(part, count + 1):
            for first in range(part - 1, end):
                value = add(least[part - 1][first], total[end] - total[first])
                if value < least[part][end]:
                    least[part][end], cut[part][end] = value, first
    ends = [count]
    for part in range(parts, 1, -1):
        ends.append(cut[part][ends[-1]])
    return ends[::-1], least[parts][count]
