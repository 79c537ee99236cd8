"""What explains the difference of a run and its prediction: where each rank's step went, and what each stage took."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from mmplan.cost_models.graph import ComputationGraph
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import TimedAction
from mmplan.planner.stage_graph import build_stage_graph
from mmplan.planner.step_parts import RankParts, step_parts
from mmplan.runtime.measurement import Measurement
from mmplan.runtime.recorded_steps import Steps


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStepParts:
    """Where the step of one rank went, as planned and as measured."""

    planned: RankParts
    measured: RankParts


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputePrice:
    """All computes of one kind of one stage in the recorded step: their mean seconds, planned and measured."""

    stage: int
    kind: str
    count: int
    planned_s: float
    measured_s: float


def rank_step_parts(plan: Plan, graph: ComputationGraph, steps: Steps, run: Measurement) -> tuple[RankStepParts, ...]:
    stages, program = build_stage_graph([stage.layers for stage in plan.stages], graph), steps.program
    planned = step_parts(program, stages, steps.planned.timeline, steps.planned.step_time_s)
    asked_s = dict(zip(((item.rank, str(item.action)) for item in run.timeline), run.asked_s, strict=False))
    timeline = [item for item in steps.measured.timeline if item.action.kind not in ("SEND", "RECV")]
    index = {rank.rank: place for place, rank in enumerate(program.ranks)}
    asked = [asked_s.get((index[item.rank], str(item.action)), item.start_s) for item in timeline]
    measured = step_parts(program, stages, timeline, run.step_time_s, asked if run.asked_s else ())
    return tuple(RankStepParts(planned=p, measured=m) for p, m in zip(planned, measured, strict=True))


def compute_prices(planned: Sequence[TimedAction], measured: Sequence[TimedAction]) -> tuple[ComputePrice, ...]:
    sums: dict[tuple[int, str], list[list[float]]] = {}
    for which, timeline in enumerate((planned, measured)):
        for item in timeline:
            if item.action.kind in ("F", "B", "I", "W", "STEP"):
                seconds = sums.setdefault((item.action.stage, item.action.kind), [[], []])
                seconds[which].append(item.end_s - item.start_s)
    return tuple(
        ComputePrice(stage=stage, kind=kind, count=len(after), planned_s=fmean(before), measured_s=fmean(after))
        for (stage, kind), (before, after) in sorted(sums.items())
    )
