"""The schedule of a plan: kept as text, or built from its stages alone for 1F1B and GPipe."""

from mmplan.errors import CheckError
from mmplan.planner.plan import Plan, module_of
from mmplan.planner.schedule import Schedule
from mmplan.planner.schedules.fused import stage_order
from mmplan.planner.schedules.in_flight import in_flight, stage_depth
from mmplan.planner.schedules.text import parse_schedule
from mmplan.planner.stage_graph import StageGraph


def plan_schedule(plan: Plan, stages: StageGraph) -> Schedule:
    """The order of every pipeline rank.

    Raises:
        CheckError: the plan's orders are missing, or name what its ranks do not hold.
    """
    if plan.orders:
        return _kept_orders(plan)
    if plan.schedule not in ("1f1b", "gpipe") or plan.placement:
        raise CheckError(f"a plan with schedule {plan.schedule} and {plan.pp} pipeline ranks needs `orders`")
    depths, m = [0] * len(plan.stages), plan.microbatches
    for stage in reversed(stages.order):
        behind = max((depths[target] for target in stages.successors[stage]), default=0)
        together = any(module_of(layer) in plan.together for layer in plan.stages[stage].layers)
        depths[stage] = stage_depth(behind, plan.batch_factor if together else 1)
    return tuple(
        stage_order(stage, m, in_flight(plan.schedule, m, depth), stages.has_backward[stage])
        for stage, depth in enumerate(depths)
    )


def _kept_orders(plan: Plan) -> Schedule:
    try:
        schedule = parse_schedule("\n".join(plan.orders))
    except ValueError as error:
        raise CheckError(f"orders: {error}") from error
    if len(schedule) != plan.pp:
        raise CheckError(f"orders hold {len(schedule)} lines, the plan has {plan.pp} pipeline ranks")
    for row, order in enumerate(schedule):
        held = plan.stages_of(row)
        for action in order:
            if action.stage not in held or action.microbatch >= plan.microbatches:
                stages = ", ".join(map(str, held))
                raise CheckError(
                    f"orders: pipeline rank {row} lists {action}; it holds stages {stages} "
                    f"and the step has {plan.microbatches} microbatches"
                )
    return schedule
