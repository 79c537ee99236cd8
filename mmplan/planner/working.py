"""What the pipeline ranks of a plan need beside states and the activations of mean microbatches."""

from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.peak_loads import peak_loads
from mmplan.cost_models.planned_memory import loss_working_bytes, planned_excess_bytes, planned_working_bytes
from mmplan.planner.plan import Plan


def working_bytes(plan: Plan, graph: ComputationGraph) -> tuple[int, ...]:
    """Bytes of each pipeline rank at work in a microbatch at the 99th percentile: of its stage that needs most, and of
    its losses what they need beyond."""
    scenario, loads = plan.scenario, peak_loads(plan.scenario, plan.microbatch_size)
    known: dict[Layout, int] = {}
    for stage in range(len(plan.stages)):
        layout = plan.layout(stage)
        if layout not in known:
            known[layout] = planned_working_bytes(graph.layers(), loads, scenario, layout)
    found = []
    for row in range(plan.pp):
        own = plan.stages_of(row)
        beyond = sum(
            loss_working_bytes(graph.layer(x), loads[graph.layer(x).module], scenario, layout, known[layout])
            for stage in own
            for layout in (plan.layout(stage),)
            for x in plan.stages[stage].layers
        )
        found.append(max(known[plan.layout(stage)] for stage in own) + beyond)
    return tuple(found)


def excess_bytes(plan: Plan, graph: ComputationGraph) -> tuple[int, ...]:
    """Bytes of each pipeline rank that a microbatch at the 99th percentile keeps beyond a mean one."""
    mean, peak = (of(plan.scenario, plan.microbatch_size) for of in (mean_loads, peak_loads))
    found = [0] * plan.pp
    for index, stage in enumerate(plan.stages):
        layout = plan.layout(index)
        for layer in map(graph.layer, stage.layers):
            pair = mean[layer.module], peak[layer.module]
            found[plan.row(index)] += planned_excess_bytes(layer, *pair, plan.scenario, layout)
    return tuple(found)
