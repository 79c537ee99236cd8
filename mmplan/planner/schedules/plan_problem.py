"""The schedule problem of a plan: its stages and ranks with the seconds and bytes of a mean step."""

from dataclasses import replace
from math import lcm

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.planned_memory import planned_kept_bytes, planned_state_bytes
from mmplan.planner.border import way_s
from mmplan.planner.mesh import message_bytes
from mmplan.planner.plan import Plan
from mmplan.planner.schedule import Compute, Schedule
from mmplan.planner.schedules.problem import Role, ScheduleProblem, StageEdge, StageWork
from mmplan.planner.stage_graph import CutTensor, build_stage_graph
from mmplan.planner.working import excess_bytes, working_bytes


def plan_problem(plan: Plan, graph: ComputationGraph, costs: CostModel) -> ScheduleProblem:
    """Stages of the plan on its pipeline ranks.

    A microbatch's activations are held until its last compute: the weight gradients need the inputs of every linear
    layer. A stage that recomputes has whole backwards (here input gradients of that length): between two halves it
    would hold what it had dropped. So has one that shards gradients, which are whole in a layer's backward only.
    Capacity is what weights, gradients, optimizer state and the device's reserve leave.
    Tensors between the same two ranks share a link, so their seconds add up.

    Raises:
        CheckError: the cut is not acyclic or leaves a layer out.
    """
    stages = build_stage_graph([stage.layers for stage in plan.stages], graph)
    m, scenario = plan.microbatches, plan.scenario
    work = []
    rows = zip(working_bytes(plan, graph), excess_bytes(plan, graph), strict=True)
    static_bytes = [at_work + excess for at_work, excess in rows]
    for index, stage in enumerate(plan.stages):
        layers, layout = [graph.layer(layer) for layer in stage.layers], plan.layout(index)
        loads = mean_loads(scenario, plan.samples(index))
        input_s = sum(costs.dgrad_s(layer, loads[layer.module], layout) for layer in layers)
        weight_s = sum(costs.wgrad_s(layer, loads[layer.module], layout) for layer in layers)
        held = sum(planned_kept_bytes(layer, loads[layer.module], scenario, layout) for layer in layers)
        backward, trained = stages.has_backward[index], any(layer.trainable for layer in layers)
        if is_whole(plan, index):
            input_s, weight_s, trained = input_s + weight_s, 0.0, False
        work.append(
            StageWork(
                rank=plan.row(index),
                forward_s=(sum(costs.forward_s(layer, loads[layer.module], layout) for layer in layers),) * m,
                input_s=(input_s,) * m if backward else (),
                weight_s=(weight_s,) * m if backward and trained else (),
                held=(float(held),) * m,
                released_by_input=0.0,
                role=_role(plan, index),
            )
        )
        static_bytes[plan.row(index)] += sum(planned_state_bytes(layer, scenario, layout) for layer in layers)
    lags: dict[tuple[int, int], tuple[float, float]] = {}
    cluster = scenario.cluster
    for cut in stages.cuts:
        forward_s, backward_s = lags.get((cut.source, cut.target), (0.0, 0.0))
        if plan.row(cut.source) != plan.row(cut.target):
            near = cluster.node_of(plan.rank(cut.source, 0)) == cluster.node_of(plan.rank(cut.target, 0))
            there_s, back_s = _transfer_s(plan, graph, costs, cut, near)
            forward_s += there_s
            backward_s += back_s if cut.carries_grad else 0.0
        lags[cut.source, cut.target] = forward_s, backward_s
    carrying = {(cut.source, cut.target) for cut in stages.cuts if cut.carries_grad}
    return ScheduleProblem(
        stages=tuple(work),
        edges=tuple(
            StageEdge(source=a, target=b, forward_s=f, backward_s=g, carries_grad=(a, b) in carrying)
            for (a, b), (f, g) in sorted(lags.items())
        ),
        microbatches=m,
        capacity=tuple(_free_bytes(plan, row) - static_bytes[row] for row in range(plan.pp)),
    )


def _transfer_s(
    plan: Plan, graph: ComputationGraph, costs: CostModel, cut: CutTensor, near: bool
) -> tuple[float, float]:
    """Seconds of a tensor of a mean microbatch, and of its gradient."""
    scenario, border = plan.scenario, plan.border(cut.activation, cut.source, cut.target)
    source, target, layout = border.source, border.target, plan.layout(cut.source)
    part = mean_loads(scenario, plan.microbatch_size * plan.dp // lcm(source.dp, target.dp))
    if source != target:
        message = message_bytes(cut.edge, part, scenario.precision_of(cut.edge), *border.seen)
        layouts = layout, plan.layout(cut.target)
        there_s, back_s = (
            way_s(costs, message, border, layouts, near=near, gradient=gradient) for gradient in (False, True)
        )
        return there_s, back_s
    size = layout.sent_bytes(cut.edge, graph, part, scenario)
    made_s = costs.make_whole_s(size, layout) if layout.makes_whole(cut.edge, graph) else (0.0, 0.0)
    sent_s = costs.transfer_s(size, near) if size else 0.0
    return sent_s + made_s[0], sent_s + made_s[1]


def is_whole(plan: Plan, stage: int) -> bool:
    """Whether the backwards of the stage are not split: it recomputes, or sums gradients behind each of them."""
    layout = plan.layout(stage)
    modules = {layer.rpartition(".")[0] for layer in plan.stages[stage].layers}
    holders = layout.replicas * (1 if modules.isdisjoint(layout.spread) else layout.tp)
    shared = plan.sharding in ("gradients", "parameters") and holders > 1
    return shared or plan.stages[stage].recompute != "none"


def why_whole(plan: Plan, stage: int) -> str:
    """Of a stage whose backwards are not split, which choice of the plan that is, and the constraint without it."""
    level = plan.stages[stage].recompute
    if level != "none":
        return f"it has recompute={level}, and whole backwards: set `constraints.recompute: [none]` and optimize again"
    return (
        f"replicas have sharding={plan.sharding}, and whole backwards: set `constraints.sharding: [none, optimizer]` "
        "and optimize again"
    )


def whole_backwards(plan: Plan, schedule: Schedule) -> Schedule:
    """The schedule with B where a stage has whole backwards."""

    def whole(action: Compute) -> Compute:
        return replace(action, kind="B") if action.kind == "I" and is_whole(plan, action.stage) else action

    return tuple(tuple(map(whole, row)) for row in schedule)


def _role(plan: Plan, stage: int) -> Role:
    """Encoder where no layer of a language model lies in the stage, generator behind another language model's."""
    modules = {layer.rsplit(".", 1)[0] for layer in plan.stages[stage].layers}
    model = plan.scenario.model
    languages = [name for name in modules if model.module(name).kind == "language_model"]
    if not languages:
        return "encoder"
    fed = {edge.consumer for edge in model.edges if model.module(edge.producer).kind == "language_model"}
    return "generator" if all(name in fed for name in languages) else "backbone"


def _free_bytes(plan: Plan, row: int) -> float:
    """What a rank of the row may use beside its reserve."""
    stage = plan.stages_of(row)[0]
    pools = [plan.scenario.cluster.pool_of(rank) for rank in plan.stage_ranks(stage)]
    share = 1 - plan.scenario.constraints.memory_headroom
    return float(min(int(pool.device.memory_bytes * share) - pool.device.reserved_bytes for pool in pools))
