"""Are the placement, the orders and the schedule's certificate of a plan sound? Knows nothing of how they were made."""

from collections.abc import Iterator, Sequence

from mmplan.cost_models.graph import ComputationGraph
from mmplan.planner.finding import Finding
from mmplan.planner.plan import Plan
from mmplan.planner.schedule import Compute

_TOLERANCE = 1e-6  # of numbers that are computed from each other


def check_placement(plan: Plan, graph: ComputationGraph) -> Iterator[Finding]:
    """Every stage on a pipeline rank, no pipeline rank without a stage."""
    if not plan.placement:
        return
    if len(plan.placement) != len(plan.stages) or min(plan.placement) < 0:
        message = f"placement names pipeline ranks {list(plan.placement)} for {len(plan.stages)} stages"
        yield Finding(rule="placement", message=message)
        return
    for row in sorted(set(range(plan.pp)) - set(plan.placement)):
        yield Finding(rule="placement", message=f"pipeline rank {row} of {plan.pp} holds no stage")


def check_orders(plan: Plan, graph: ComputationGraph) -> Iterator[Finding]:
    """One line per pipeline rank, of actions of its own stages; present unless the schedule follows from the stages."""
    if not plan.orders:
        if plan.placement or plan.schedule not in ("1f1b", "gpipe"):
            message = f"schedule {plan.schedule} on {plan.pp} pipeline ranks needs `orders`, the plan has none"
            yield Finding(rule="orders", message=message)
        return
    if len(plan.orders) != plan.pp:
        message = f"orders hold {len(plan.orders)} lines, the plan has {plan.pp} pipeline ranks"
        yield Finding(rule="orders", message=message)
        return
    for row, line in enumerate(plan.orders):
        for word in line.split():
            try:
                action = Compute.parse(word)
            except ValueError as error:
                yield Finding(rule="orders", message=f"line {row} of orders: {error}")
                return
            known = action.stage < len(plan.stages) and plan.row(action.stage) == row
            if not known or action.microbatch >= plan.microbatches:
                message = f"line {row} of orders lists {word}: no such stage or microbatch on this pipeline rank"
                yield Finding(rule="orders", message=message)
                return


def check_schedule_certificate(plan: Plan) -> Iterator[Finding]:
    """The bound is no higher than the makespan, and the gap is theirs."""
    proof = plan.schedule_certificate
    if proof is None:
        return
    if proof.bound_s > proof.makespan_s * (1 + _TOLERANCE):
        message = f"the schedule's bound {proof.bound_s:.6g} s is above its makespan {proof.makespan_s:.6g} s"
        yield Finding(rule="schedule bound", message=message)
    gap = (proof.makespan_s - proof.bound_s) / proof.makespan_s if proof.makespan_s > 0 else 0.0
    if abs(gap - proof.gap) > _TOLERANCE:
        message = f"the schedule records a gap of {proof.gap:.6f}, makespan and bound give {gap:.6f}"
        yield Finding(rule="schedule gap", message=message)


def held_microbatches(plan: Plan, row: int, kept_bytes: Sequence[int]) -> tuple[dict[int, int], int]:
    """Walk through the order of a pipeline rank: most microbatches of each stage between their forward and their last
    compute, and the most bytes that all of them keep at once.

    Args:
        kept_bytes: of one microbatch, by stage.
    """
    actions = [Compute.parse(word) for word in plan.orders[row].split()]
    last = {(action.stage, action.microbatch): place for place, action in enumerate(actions)}
    alive = dict.fromkeys(plan.stages_of(row), 0)
    most = dict(alive)
    held = peak = 0
    for place, action in enumerate(actions):
        if action.kind == "F":
            alive[action.stage] += 1
            held += kept_bytes[action.stage]
            most[action.stage] = max(most[action.stage], alive[action.stage])
            peak = max(peak, held)
        if last[action.stage, action.microbatch] == place:
            alive[action.stage] -= 1
            held -= kept_bytes[action.stage]
    return most, peak
