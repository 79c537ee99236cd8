"""What a plan takes: seconds, bytes and memory of every rank over one optimizer step.

`simulate` prices the plan's program with a cost model; `replay` takes the seconds of each action from anywhere, for
example from a run, and goes through the same clock.
"""

from collections.abc import Sequence

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.load import Loads
from mmplan.cost_models.loads import mean_loads
from mmplan.planner.durations import predicted_durations
from mmplan.planner.liveness import Footprint, footprint, memory_steps, peak_buffer_bytes
from mmplan.planner.lower import lower
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction, RankPrediction, TimedAction
from mmplan.planner.program import Program
from mmplan.planner.timing import Timing, time_program


def simulate(
    plan: Plan, graph: ComputationGraph, costs: CostModel, loads: Sequence[Sequence[Loads]] | None = None
) -> Prediction:
    """One optimizer step of the plan.

    Args:
        loads: [replica][microbatch]; None gives every microbatch the mean load of the data.

    Raises:
        CheckError: the plan's stages wait for each other or leave a layer out.
    """
    loads = mean_step_loads(plan) if loads is None else loads
    program = lower(plan, graph, loads)
    durations = predicted_durations(plan, graph, costs, program, loads)
    return replay(program, durations, footprint(plan, graph, program, loads))


def mean_step_loads(plan: Plan) -> tuple[tuple[Loads, ...], ...]:
    """Loads of a step in which all microbatches are mean: one replica stands for all."""
    mean = mean_loads(plan.scenario, plan.microbatch_size)
    return ((mean,) * plan.microbatches,)


def replay(program: Program, durations: Sequence[Sequence[float]], memory: Footprint) -> Prediction:
    """The step that results when every action takes the given seconds (see `time_program`)."""
    timing = time_program(program, durations)
    computes = [
        (start_s, end_s)
        for index, rank in enumerate(program.ranks)
        for action, start_s, end_s in zip(rank.actions, timing.start_s[index], timing.end_s[index], strict=True)
        if action.kind in "FBIW"
    ]
    pipeline_s = max(end_s for _, end_s in computes) - min(start_s for start_s, _ in computes)
    ranks = tuple(_rank_prediction(program, index, timing, memory, pipeline_s) for index in range(len(program.ranks)))
    return Prediction(
        step_time_s=max(end_s for row in timing.end_s for end_s in row),
        pipeline_s=pipeline_s,
        bubble=_bubble(sum(rank.busy_s for rank in ranks), len(ranks) * pipeline_s),
        ranks=ranks,
        timeline=tuple(
            TimedAction(rank.rank, action, start_s, end_s)
            for index, rank in enumerate(program.ranks)
            for action, start_s, end_s in zip(rank.actions, timing.start_s[index], timing.end_s[index], strict=True)
        ),
    )


def _bubble(busy_s: float, available_s: float) -> float:
    return 1.0 - busy_s / available_s if available_s > 0 else 0.0


def _rank_prediction(
    program: Program, index: int, timing: Timing, memory: Footprint, pipeline_s: float
) -> RankPrediction:
    rank = program.ranks[index]
    timed = [
        TimedAction(rank.rank, action, start_s, end_s)
        for action, start_s, end_s in zip(rank.actions, timing.start_s[index], timing.end_s[index], strict=True)
    ]

    def total_s(kinds: tuple[str, ...]) -> float:
        return sum(item.end_s - item.start_s for item in timed if item.action.kind in kinds)

    def total_bytes(kind: str) -> int:
        return sum(item.action.bytes for item in timed if item.action.kind == kind)

    busy_s = total_s(("F", "B", "I", "W"))
    steps = memory_steps(timed, memory.static_bytes[index], memory.kept_bytes[index])
    return RankPrediction(
        rank=rank.rank,
        stage=rank.stage,
        replica=rank.replica,
        busy_s=busy_s,
        bubble=_bubble(busy_s, pipeline_s),
        sent_bytes=total_bytes("SEND"),
        received_bytes=total_bytes("RECV"),
        reduce_bytes=total_bytes("REDUCE"),
        transfer_s=total_s(("SEND", "RECV")),
        reduce_s=total_s(("REDUCE",)),
        peak_memory_bytes=max(held for _, held in steps),
        peak_buffer_bytes=peak_buffer_bytes(timed),
        memory_steps=steps,
    )
