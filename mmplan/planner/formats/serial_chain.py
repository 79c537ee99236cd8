"""Stages side by side, run one behind the other: what a runtime of chains makes of parallel encoders.

Each stage hands on, beside its own output, what later stages need of earlier ones. That costs the hops of those tensors
and the time of stages that waited for nobody, and every stage holds as many microbatches as stages follow in the row.
"""

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.errors import CheckError
from mmplan.planner.formats.exported import Loss
from mmplan.planner.plan import Plan
from mmplan.planner.pricing import Prices, way_s
from mmplan.planner.recipes import step_time
from mmplan.planner.schedule import Schedule
from mmplan.planner.schedules.fused import stage_order
from mmplan.planner.stage_graph import StageGraph
from mmplan.units import format_bytes


def is_chain(stages: StageGraph) -> bool:
    """Whether each stage feeds the next one alone."""
    last = len(stages.successors) - 1
    return all(fed == ((stage + 1,) if stage < last else ()) for stage, fed in enumerate(stages.successors))


def serial_orders(plan: Plan) -> Schedule:
    """1F1B along the row of stages, one on each pipeline rank."""
    count = len(plan.stages)
    return tuple(stage_order(stage, plan.microbatches, count - stage, True) for stage in range(count))


def serial_price(plan: Plan, stages: StageGraph, target: str) -> Loss:
    """What a plan under 1F1B, one stage per rank, loses in a row (closed form).

    Raises:
        CheckError: a stage cannot hold the microbatches that it then has to.
    """
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    prices = Prices(plan.scenario, graph, costs)
    loads = prices.loads(plan.microbatch_size)
    near = plan.rank_count <= min(pool.devices_per_node for pool in plan.scenario.cluster.pools)
    path_s = sum(stage.forward_s + stage.backward_s for stage in plan.stages)
    for cut in stages.cuts:
        layout = plan.layout(cut.source)
        hop_s = way_s(costs, cut.edge, graph, loads, plan.scenario, layout, near)
        path_s += (cut.target - cut.source) * hop_s
    _require_memory(plan, prices, target)
    side_by_side = step_time(plan)
    sentence = f"{target} runs chains: stages side by side run in a row and hand on what they do not use"
    return Loss(sentence=sentence, step_s=path_s - side_by_side.critical_path_s)


def _require_memory(plan: Plan, prices: Prices, target: str) -> None:
    for index, stage in enumerate(plan.stages):
        priced = prices.layers(plan.layout(index), plan.microbatch_size)
        more = min(plan.microbatches, len(plan.stages) - index) - stage.in_flight
        needed = stage.memory_bytes + max(0, more) * sum(priced[layer].kept_bytes for layer in stage.layers)
        if needed > stage.capacity_bytes:
            raise CheckError(
                f"in {target}'s chain stage {index} holds {stage.in_flight + more} microbatches, which need "
                f"{format_bytes(needed)} of a device with {format_bytes(stage.capacity_bytes)}"
            )
