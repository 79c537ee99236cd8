"""What the tensors between unlike meshes of a plan would take each way, beside the way that the plan records."""

from dataclasses import dataclass
from math import lcm

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.loads import mean_loads
from mmplan.planner.border import Way, ways_s
from mmplan.planner.mesh import message_bytes
from mmplan.planner.plan import Plan
from mmplan.planner.stage_graph import build_stage_graph


@dataclass(frozen=True, kw_only=True, slots=True)
class BorderChoice:
    """A tensor of a mean microbatch between two stages; `seconds`: there and, of its gradient, back. `message_bytes`:
    between two ranks, of one of the smallest parts of samples."""

    tensor: str
    way: Way
    message_bytes: int
    seconds: dict[Way, float]


def border_choices(plan: Plan, graph: ComputationGraph, costs: CostModel) -> tuple[BorderChoice, ...]:
    """In the order of their producers, by the closed form's rule for links."""
    scenario = plan.scenario
    near = plan.world <= min(pool.devices_per_node for pool in scenario.cluster.pools)
    found = []
    for cut in build_stage_graph([stage.layers for stage in plan.stages], graph).cuts:
        border = plan.border(cut.activation, cut.source, cut.target)
        if border.source == border.target:
            continue
        loads = mean_loads(scenario, plan.microbatch_size * plan.dp // lcm(border.source.dp, border.target.dp))
        layouts, ends = (plan.layout(cut.source), plan.layout(cut.target)), (border.source, border.target)
        found.append(
            BorderChoice(
                tensor=cut.activation,
                way=border.way,
                message_bytes=message_bytes(cut.edge, loads, scenario.precision_of(cut.edge), *border.seen),
                seconds=ways_s(costs, cut.edge, loads, scenario.precision_of(cut.edge), ends, layouts, near),
            )
        )
    return tuple(found)
