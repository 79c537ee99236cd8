"""What a plan takes: seconds, bytes and memory of every rank over one optimizer step.

`simulate` prices the plan's program with a cost model; `replay` takes the seconds of each action from anywhere, for
example from a run, and goes through the same clock.
"""

from collections.abc import Mapping, Sequence

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.load import Loads
from mmplan.planner.durations import predicted_durations
from mmplan.planner.liveness import Footprint, footprint, memory_steps, peak_buffer_bytes
from mmplan.planner.lower import lower
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction, RankPrediction, TimedAction
from mmplan.planner.program import Program, RankProgram
from mmplan.planner.step_loads import mean_step_loads
from mmplan.planner.timing import time_program


def simulate(
    plan: Plan, graph: ComputationGraph, costs: CostModel, loads: Sequence[Sequence[Loads]] | None = None
) -> Prediction:
    """One optimizer step of the plan.

    Args:
        loads: [part][microbatch], see `step_loads.py`; None gives every microbatch the mean load of the data.

    Raises:
        CheckError: the plan's stages wait for each other or leave a layer out.
    """
    loads = mean_step_loads(plan) if loads is None else loads
    program = lower(plan, graph, loads)
    durations = predicted_durations(plan, graph, costs, program, loads)
    return replay(program, durations, footprint(plan, graph, program, loads))


def replay(program: Program, durations: Sequence[Sequence[float]], memory: Footprint) -> Prediction:
    """The step that results when every action takes the given seconds (see `time_program`)."""
    timing = time_program(program, durations)
    timed = [
        [
            TimedAction(rank.rank, action, start_s, end_s)
            for action, start_s, end_s in zip(rank.actions, starts, ends, strict=True)
        ]
        for rank, starts, ends in zip(program.ranks, timing.start_s, timing.end_s, strict=True)
    ]
    computes = [item for row in timed for item in row if item.action.kind in "FBIW"]
    pipeline_s = max(item.end_s for item in computes) - min(item.start_s for item in computes)
    ranks = tuple(
        _rank_prediction(rank, row, static, (kept, freed), pipeline_s)
        for rank, row, static, kept, freed in zip(
            program.ranks, timed, memory.static_bytes, memory.kept_bytes, memory.freed_bytes, strict=True
        )
    )
    return Prediction(
        step_time_s=max(item.end_s for row in timed for item in row),
        pipeline_s=pipeline_s,
        bubble=_bubble(sum(rank.busy_s for rank in ranks), len(ranks) * pipeline_s),
        ranks=ranks,
        timeline=tuple(item for row in timed for item in row),
    )


def _bubble(busy_s: float, available_s: float) -> float:
    return 1.0 - busy_s / available_s if available_s > 0 else 0.0


def _rank_prediction(
    rank: RankProgram,
    timed: Sequence[TimedAction],
    static_bytes: int,
    kept_and_freed: tuple[Mapping[tuple[int, int], int], Mapping[tuple[int, int], int]],
    pipeline_s: float,
) -> RankPrediction:
    def total_s(kinds: tuple[str, ...]) -> float:
        return sum(item.end_s - item.start_s for item in timed if item.action.kind in kinds)

    def total_bytes(kind: str) -> int:
        return sum(item.action.bytes * item.action.copies for item in timed if item.action.kind == kind)

    busy_s = total_s(("F", "B", "I", "W"))
    steps = memory_steps(timed, static_bytes, *kept_and_freed)
    return RankPrediction(
        rank=rank.rank,
        stage=rank.stage,
        replica=rank.replica,
        busy_s=busy_s,
        bubble=_bubble(busy_s, pipeline_s),
        sent_bytes=total_bytes("SEND"),
        received_bytes=total_bytes("RECV"),
        reduce_bytes=sum(total_bytes(kind) for kind in ("F", "B", "I", "REDUCE", "TIE", "STEP")),
        transfer_s=total_s(("SEND", "RECV")),
        reduce_s=total_s(("REDUCE", "TIE")),
        peak_memory_bytes=max(held for _, held in steps),
        peak_buffer_bytes=peak_buffer_bytes(timed),
        memory_steps=steps,
    )
