"""Seconds of every action of a program: by a cost model, or as measured."""

from collections import Counter
from collections.abc import Mapping

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layout import Layout, Trained
from mmplan.cost_models.load import Loads
from mmplan.planner.border import way_s
from mmplan.planner.lower import stage_trained
from mmplan.planner.mesh import shared_parts
from mmplan.planner.plan import Plan
from mmplan.planner.program import Action, Program, RankProgram, named_by_layers, target_layer
from mmplan.planner.step_loads import StageLoads, StepLoads
from mmplan.planner.ties import tie_near, tie_seconds, tied_tables
from mmplan.planner.timing import Seconds


def predicted_durations(
    plan: Plan, graph: ComputationGraph, costs: CostModel, program: Program, loads: StepLoads
) -> Seconds:
    """Seconds of each action of the program by the cost model."""
    layers = [[graph.layer(layer) for layer in stage.layers] for stage in plan.stages]
    layouts = [plan.layout(stage) for stage in range(len(plan.stages))]
    trained = [stage_trained(plan, graph, stage) for stage in range(len(plan.stages))]
    seen, meshes = StageLoads(plan, loads), [plan.mesh(stage) for stage in range(len(plan.stages))]
    first = [plan.first_rank(stage) for stage in range(len(plan.stages))]
    priced: dict[tuple[int, str, int], float] = {}  # equal loads are the same object in a mean step

    stage_of, ties = plan.stage_of_layer(), tied_tables(plan, graph)

    def compute_s(stage: int, kind: str, load: Loads) -> float:
        key = (stage, kind, id(load))
        if key not in priced:
            price = {"F": (costs.forward_s,), "B": (costs.dgrad_s, costs.wgrad_s), "I": (costs.dgrad_s,)}
            parts = price.get(kind, (costs.wgrad_s,))
            priced[key] = sum(
                part(layer, load[layer.module], layouts[stage])
                for layer in layers[stage]
                if layer.module in load
                for part in parts
            )
        return priced[key]

    def gather_s(stage: int) -> float:
        """Behind an update in shares."""
        if plan.sharding == "none":
            return 0.0
        return costs.gather_s(trained[stage], layouts[stage], replicas_per_node(plan, stage))

    def action_s(rank: RankProgram, action: Action) -> float:
        if action.kind == "SEND":
            cluster = plan.scenario.cluster
            near = cluster.node_of(rank.rank) == cluster.node_of(action.peer)
            # parts of a tensor share the links of the busiest rank, so each arrives when all have
            ends = (action.stage, stage_of[target_layer(action.tensor)]) if plan.meshes else (0, 0)
            sender, getter = meshes[ends[0]], meshes[ends[1]]
            if sender == getter:
                made_s = made_whole_s(layouts[action.stage], graph, costs, action.tensor, action.bytes)
                return costs.transfer_s(action.bytes, near) + made_s
            gradient, partner = "<" in action.tensor, (action.peer - first[ends[1]]) // getter.width
            part_bytes = action.bytes / shared_parts(rank.replica, sender, partner, getter)
            ways = ends[::-1] if gradient else ends
            border, at = plan.border(action.tensor, *ways), [layouts[end] for end in ways]
            return way_s(costs, part_bytes, border, at, near=near, gradient=gradient)
        if action.kind == "REDUCE":
            stage = action.stage
            whole_s = costs.reduce_s(trained[stage], layouts[stage], replicas_per_node(plan, stage))
            return whole_s - gather_s(stage)
        if action.kind == "TIE":
            stages = ties[action.microbatch].stages
            near, count = tie_near(plan, stages, rank.replica), len(set(map(plan.row, stages)))
            return tie_seconds(costs, action.bytes, count, near)
        if action.kind == "STEP":
            held = plan.stages_of(plan.row(rank.stage))
            update_s = costs.update_s(sum((trained[stage] for stage in held), Trained()), layouts[rank.stage])
            return update_s + sum(gather_s(stage) for stage in held)
        if action.kind == "RECV":
            return 0.0
        load = seen.of_compute(action.stage, rank.replica, action.kind, action.microbatch)
        return compute_s(action.stage, action.kind, load)

    return tuple(tuple(action_s(rank, action) for action in rank.actions) for rank in program.ranks)


def made_whole_s(layout: Layout, graph: ComputationGraph, costs: CostModel, tensor: str, size: int) -> float:
    """Before a tensor is sent, or behind a gradient that came: ranks that have parts of it make it whole."""
    if not layout.spread:
        return 0.0
    producer, consumer = named_by_layers(tensor).replace("<", ">").split(">")
    if not layout.makes_whole(graph.edge(producer, consumer), graph):
        return 0.0
    return costs.make_whole_s(size, layout)["<" in tensor]


def replicas_per_node(plan: Plan, stage: int) -> int:
    """Most of a stage's dp * cp ranks with the same weights that share one node."""
    nodes = Counter(plan.scenario.cluster.node_of(rank) for rank in plan.stage_ranks(stage)[:: plan.mesh(stage).tp])
    return max(nodes.values())


def with_measured(program: Program, durations: Seconds, measured_s: Mapping[tuple[int, str], float]) -> Seconds:
    """`durations` with those of computes, reductions and updates replaced where `measured_s[rank, action's text]`
    exists."""
    return tuple(
        tuple(
            measured_s.get((rank.rank, str(action)), predicted_s)
            for action, predicted_s in zip(rank.actions, row, strict=True)
        )
        for rank, row in zip(program.ranks, durations, strict=True)
    )
