"""The recorded step of a run beside its predictions."""

from dataclasses import dataclass

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.durations import predicted_durations, with_measured
from mmplan.planner.liveness import Footprint, footprint
from mmplan.planner.lower import lower
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction
from mmplan.planner.program import Program
from mmplan.planner.simulate import replay
from mmplan.planner.step_loads import drawn_step_loads
from mmplan.planner.timing import Seconds
from mmplan.runtime.measured_step import measured_step
from mmplan.runtime.measurement import Measurement
from mmplan.runtime.places import once_each
from mmplan.runtime.run_check import require_computes


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The recorded step as planned, replayed with measured computes, and measured."""

    program: Program
    durations: Seconds  # as planned
    planned: Prediction
    replayed: Prediction
    measured: Prediction


def recorded_steps(plan: Plan, run: Measurement) -> Steps:
    """The recorded step three times; in a rehearsal the plan's computes are stretched alike.

    Raises:
        InputError: the run does not hold every action of the plan once.
    """
    program, planned, memory = _priced(plan, run.recorded_step, run.time_scale)
    program = once_each(program) if run.rehearsed and plan.meshes else program
    require_computes(run, program)
    measured_s = {
        (program.ranks[item.rank].rank, str(item.action)): item.end_s - item.start_s
        for item in run.timeline
        if item.action.kind not in ("REDUCE", "TIE")
    }
    return Steps(
        program=program,
        durations=planned,
        planned=replay(program, planned, memory),
        replayed=replay(program, with_measured(program, planned, measured_s), memory),
        measured=measured_step(program, run, planned),
    )


def predict(plan: Plan, step: int, time_scale: float = 1.0) -> Prediction:
    """A step's samples under the plan's cost model, computes `time_scale` times as long."""
    return replay(*_priced(plan, step, time_scale))


def _priced(plan: Plan, step: int, time_scale: float) -> tuple[Program, Seconds, Footprint]:
    graph, loads = build_graph(plan.scenario), drawn_step_loads(plan, step)
    program = lower(plan, graph, loads)
    priced = predicted_durations(plan, graph, AnalyticCostModel(plan.scenario), program, loads)
    return program, _stretched(program, priced, time_scale), footprint(plan, graph, program, loads)


def _stretched(program: Program, durations: Seconds, factor: float) -> Seconds:
    """Computes and updates `factor` times as long; communication as it is."""
    return tuple(
        tuple(
            seconds if action.kind in ("SEND", "RECV", "REDUCE", "TIE") else seconds * factor
            for action, seconds in zip(rank.actions, row, strict=True)
        )
        for rank, row in zip(program.ranks, durations, strict=True)
    )
