"""A plan's schedule for torch's pipelining runtime, where that can run it: it knows chains of stages with backwards."""

from mmplan.cost_models.graph import ComputationGraph
from mmplan.errors import CheckError
from mmplan.planner.plan import Plan
from mmplan.planner.plan_schedule import plan_schedule
from mmplan.planner.schedule import Compute, Schedule
from mmplan.planner.schedules.text import schedule_csv
from mmplan.planner.stage_graph import StageGraph, build_stage_graph


def torch_csv(plan: Plan, graph: ComputationGraph) -> str:
    """The orders as `_PipelineScheduleRuntime._load_csv(path, "compute_only")` reads them, one row per pipeline rank.

    The I of a stage that trains nothing becomes a whole backward, because torch wants a W for every I.

    Raises:
        CheckError: the plan's orders are not sound, or torch's runtime has no place for its stages.
    """
    stages = build_stage_graph([stage.layers for stage in plan.stages], graph)
    _refuse_other_than_chains(stages)
    refuse_stages_without_backward(plan, stages)
    trained = [any(graph.layer(layer).trainable for layer in stage.layers) for stage in plan.stages]

    def written(action: Compute) -> Compute:
        whole = action.kind == "I" and not trained[action.stage]
        return Compute(action.stage, "B", action.microbatch) if whole else action

    schedule = tuple(tuple(map(written, order)) for order in plan_schedule(plan, stages))
    _refuse_other_than_ascending(schedule, len(plan.stages) - 1)
    return schedule_csv(schedule)


def _refuse_other_than_ascending(schedule: Schedule, last: int) -> None:
    """torch takes the losses of its last stage in ascending order; in any other, gradients are wrong without a word."""
    for order in schedule:
        for kinds in ("F", "BI"):
            found = [action.microbatch for action in order if action.stage == last and action.kind in kinds]
            if found != sorted(found):
                raise CheckError(
                    f"torch's pipelining wants microbatches of the last stage in ascending order; stage {last} runs "
                    f"{'forwards' if kinds == 'F' else 'backwards'} {', '.join(map(str, found[:6]))} ..."
                )


def _refuse_other_than_chains(stages: StageGraph) -> None:
    last = len(stages.successors) - 1
    for stage, fed in enumerate(stages.successors):
        wanted = (stage + 1,) if stage < last else ()
        if fed != wanted:
            named = ", ".join(map(str, fed)) or "none"
            raise CheckError(
                f"torch's pipelining runs chains, each stage feeding the next one alone; stage {stage} feeds {named}"
            )


def refuse_stages_without_backward(plan: Plan, stages: StageGraph) -> None:
    """CheckError names the first stage that is frozen with everything in front of it."""
    for stage, backward in enumerate(stages.has_backward):
        if not backward:
            layers = plan.stages[stage].layers
            raise CheckError(
                f"torch's pipelining runs a backward on every stage; stage {stage} ({layers[0]} to {layers[-1]}) is "
                "frozen and gets no gradient"
            )
