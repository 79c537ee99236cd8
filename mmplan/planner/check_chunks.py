"""Is what a plan in several chunks per rank records of the plan with one chunk, and of itself beside it, true?"""

from collections.abc import Iterator

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import ComputationGraph
from mmplan.planner.check_numbers import check_numbers
from mmplan.planner.finding import Finding
from mmplan.planner.plan import Plan
from mmplan.units import format_seconds

_TOLERANCE = 1e-6


def check_chunk_certificate(plan: Plan, graph: ComputationGraph, costs: CostModel) -> Iterator[Finding]:
    """Numbers of the plan with one chunk; bound and gap of this one, whose step no rank can work longer than."""
    proof = plan.chunk_certificate
    if proof is None:
        return
    for finding in check_numbers(plan.one_chunk, graph, costs):
        message = f"of the plan with one chunk per rank: {finding.message}"
        yield Finding(rule=finding.rule, message=message)
    busiest_s = max(
        sum(plan.stages[stage].forward_s + plan.stages[stage].backward_s for stage in plan.stages_of(row))
        for row in range(plan.pp)
    )
    if proof.step_s < plan.microbatches * busiest_s * (1 - _TOLERANCE):
        message = f"the plan records a step of {format_seconds(proof.step_s)} in simulation, its busiest rank works "
        yield Finding(rule="chunk step", message=message + format_seconds(plan.microbatches * busiest_s))
    if proof.bound_s > proof.step_s * (1 + _TOLERANCE):
        message = f"the bound of any schedule {format_seconds(proof.bound_s)} is above the plan's own step of "
        yield Finding(rule="chunk bound", message=message + format_seconds(proof.step_s))
    gap = (proof.step_s - proof.bound_s) / proof.step_s if proof.step_s > 0 else 0.0
    if abs(gap - proof.gap) > _TOLERANCE:
        message = f"the plan records a gap of {proof.gap:.6f} for any schedule, step and bound give {gap:.6f}"
        yield Finding(rule="chunk gap", message=message)
