"""What the pipeline ranks of a plan need at work beside states and kept activations, in a mean microbatch."""

from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.planned_memory import loss_working_bytes, planned_working_bytes
from mmplan.planner.plan import Plan


def working_bytes(plan: Plan, graph: ComputationGraph) -> tuple[int, ...]:
    """Bytes of each pipeline rank: of its stage that needs most, and of its losses what they need beyond."""
    scenario, loads = plan.scenario, mean_loads(plan.scenario, plan.microbatch_size)
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
