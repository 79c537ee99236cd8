"""What ranks moved in every step of a run beside what had to be moved.

For the scenario's own samples the plan says it, step by step. What a job moves depends on its data: there a run has
brought along what each step's programs and recordings had foreseen.
"""

from mmplan.cost_models.graph import ComputationGraph
from mmplan.planner.columns import RECV, SEND, program_of
from mmplan.planner.lower import lower_columns
from mmplan.planner.plan import Plan
from mmplan.planner.step_loads import drawn_step_loads
from mmplan.planner.tensor_traffic import tensor_bytes
from mmplan.runtime.measurement import Measurement, Moved


def planned_steps(plan: Plan, graph: ComputationGraph, run: Measurement) -> dict[int, Moved]:
    """By step, of those whose bytes the run has; all listed ranks together."""
    known = [step for step in run.steps if step.moved is not None]
    if run.own_data:
        return {step.index: step.foreseen for step in known if step.foreseen is not None}
    return {step.index: _planned(plan, graph, step.index, rehearsed=run.rehearsed) for step in known}


def _planned(plan: Plan, graph: ComputationGraph, step: int, *, rehearsed: bool) -> Moved:
    loads = drawn_step_loads(plan, step)
    columns = lower_columns(plan, graph, loads).columns
    sizes = columns.bytes if columns.copies is None or rehearsed else columns.bytes * columns.copies
    return Moved(
        sent_bytes=int(sizes[columns.kind == SEND].sum()),
        reduce_bytes=int(sizes[(columns.kind != SEND) & (columns.kind != RECV)].sum()),
        tensor_bytes=0 if rehearsed else sum(tensor_bytes(plan, graph, program_of(columns), loads)),
    )
