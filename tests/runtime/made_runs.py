"""Runs that are made up: a program that took given seconds, or what was predicted."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.durations import predicted_durations
from mmplan.planner.liveness import footprint
from mmplan.planner.lower import lower
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction, TimedAction
from mmplan.planner.program import Action, Program
from mmplan.planner.simulate import replay
from mmplan.planner.step_loads import drawn_step_loads
from mmplan.planner.tensor_traffic import tensor_bytes
from mmplan.planner.timing import Seconds
from mmplan.runtime.measurement import (
    Measurement,
    RankMeasurement,
    StepMeasurement,
    TransferMeasurement,
    plan_hash,
)
from mmplan.runtime.timeline import bare


def done_of(prediction: Prediction) -> tuple[TimedAction, ...]:
    """The timeline of a run that did exactly as predicted."""
    done = (item for item in prediction.timeline if item.action.kind not in ("SEND", "RECV"))
    return tuple(replace(item, action=bare(item.action)) for item in done)


def priced(plan: Plan) -> tuple[Program, Seconds]:
    """The program of the first step and its predicted durations."""
    graph, loads = build_graph(plan.scenario), drawn_step_loads(plan, 0)
    program = lower(plan, graph, loads)
    return program, predicted_durations(plan, graph, AnalyticCostModel(plan.scenario), program, loads)


def changed(program: Program, durations: Seconds, change: Callable[[int, Action, float], float]) -> Seconds:
    """Other durations: `change(rank, action, seconds)`."""
    return tuple(
        tuple(change(rank.rank, action, seconds) for action, seconds in zip(rank.actions, row, strict=True))
        for rank, row in zip(program.ranks, durations, strict=True)
    )


def run_that_took(plan: Plan, program: Program, durations: Seconds, late_s: float = 0.0) -> Measurement:
    """A run of the plan's first step whose actions took these seconds, on the ranks' own clock.

    Ranks ask for the inputs of an action as soon as the one before has ended; `late_s`: and then all end so much later.
    """
    graph = build_graph(plan.scenario)
    loads = drawn_step_loads(plan, 0)
    step = replay(program, durations, footprint(plan, graph, program, loads))
    timeline, exchanged = done_of(step), tensor_bytes(plan, graph, program, loads)
    alone: dict[tuple[int, int, int], float] = {}
    for rank, row in zip(program.ranks, durations, strict=True):
        for action, seconds in zip(rank.actions, row, strict=True):
            if action.kind == "SEND":
                key = (rank.rank, action.peer, action.bytes)
                alone[key] = min(seconds, alone.get(key, seconds))
    return Measurement(
        plan_hash=plan_hash(plan),
        mmplan_version="0",
        torch_version="0",
        python_version="3",
        device="cpu",
        backend="gloo",
        hosts=("here",),
        processes_per_core=0.5,
        rehearsed=False,
        time_scale=1.0,
        steps=(StepMeasurement(index=0, step_time_s=step.step_time_s + late_s, losses={"llm": 6.0}),),
        recorded_step=0,
        pipeline_s=step.pipeline_s,
        bubble=step.bubble,
        ranks=tuple(replace(rank, tensor_bytes=n) for rank, n in zip(measured_ranks(step), exchanged, strict=True)),
        actions=(),
        timeline=timeline,
        asked_s=asked_times(timeline),
        transfers=tuple(
            TransferMeasurement(source=source, target=target, bytes=size, count=1, seconds=seconds)
            for (source, target, size), seconds in alone.items()
        ),
    )


def asked_times(timeline: Sequence[TimedAction]) -> tuple[float, ...]:
    asked, free_s = [], {item.rank: 0.0 for item in timeline}
    for item in timeline:
        asked.append(free_s[item.rank])
        free_s[item.rank] = item.end_s
    return tuple(asked)


def measured_ranks(step: Prediction) -> tuple[RankMeasurement, ...]:
    """Ranks that did what was predicted."""
    return tuple(
        RankMeasurement(
            rank=rank.rank,
            stage=rank.stage,
            replica=rank.replica,
            busy_s=rank.busy_s,
            bubble=rank.bubble,
            activation_bytes=rank.sent_bytes,
            gradient_bytes=0,
            reduce_bytes=rank.reduce_bytes,
            transfer_s=rank.transfer_s,
            wait_s=0.0,
            reduce_s=rank.reduce_s,
            peak_memory_bytes=rank.peak_memory_bytes,
        )
        for rank in step.ranks
    )
