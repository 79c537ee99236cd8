"""A plan under several schedules side by side: the table and values of `mmplan simulate --schedule`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.errors import InputError
from mmplan.files import write_file
from mmplan.planner.check import require_structure
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction
from mmplan.planner.schedules.families import FAMILIES
from mmplan.planner.schedules.reschedule import Choice, optimized, refuse_unusable, with_family
from mmplan.planner.schedules.search.best import SEARCH_S
from mmplan.planner.schedules.torch_export import torch_csv
from mmplan.planner.simulate import simulate
from mmplan.report.tables import table
from mmplan.scenario.schedule_names import SCHEDULE_NAMES, ScheduleName
from mmplan.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRow:
    """A mean step under one schedule; numbers are None where it does not apply, and `reason` says why.

    `stages_per_rank`: above 1 the layers were cut anew, because the schedule wants several chunks. `bound_s`: of the
    optimized schedule, the least time from the first to the last compute that any order of these stages takes.
    """

    schedule: ScheduleName
    step_time_s: float | None
    pipeline_s: float | None
    bubble: float | None
    peak_memory_bytes: int | None
    stages_per_rank: int | None
    fits: bool
    reason: str
    bound_s: float | None


def schedule_name(text: str) -> ScheduleName:
    """InputError unless it is the name of a schedule."""
    for name in SCHEDULE_NAMES:
        if name == text:
            return name
    raise InputError(f"--schedule: expected all or one of {', '.join(SCHEDULE_NAMES)}, found {text}")


def under_schedule(plan: Plan, name: ScheduleName) -> Plan:
    """The plan with another schedule.

    Raises:
        CheckError: the plan is not sound, or the schedule is not for it.
        NoPlanFoundError: the search found no schedule in memory.
    """
    require_structure(plan)
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    if name == "optimized":
        return optimized(plan, graph, costs, search_s=SEARCH_S)
    return refuse_unusable(with_family(plan, name, graph, costs))


def save_torch_csv(plan: Plan, path: Path) -> None:
    """Write the plan's schedule for torch's pipelining runtime.

    Raises:
        CheckError: the plan is not sound, or that runtime cannot run it.
        InputError: the file cannot be written.
    """
    require_structure(plan)
    write_file(path, torch_csv(plan, build_graph(plan.scenario)))


def schedule_rows(plan: Plan) -> tuple[ScheduleRow, ...]:
    """Every schedule there is, in the order of their names' list."""
    require_structure(plan)
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    rows = []
    for name in SCHEDULE_NAMES:
        if name in FAMILIES:
            choice = with_family(plan, name, graph, costs)
        else:
            found = optimized(plan, graph, costs, search_s=SEARCH_S)
            choice = Choice(name=name, plan=found, fits=True)
        rows.append(_row(choice, None if choice.plan is None else simulate(choice.plan, graph, costs)))
    return tuple(rows)


def _row(choice: Choice, prediction: Prediction | None) -> ScheduleRow:
    made = choice.plan
    proof = made.schedule_certificate if made is not None else None
    return ScheduleRow(
        schedule=choice.name,
        step_time_s=prediction.step_time_s if prediction else None,
        pipeline_s=prediction.pipeline_s if prediction else None,
        bubble=prediction.bubble if prediction else None,
        peak_memory_bytes=max(rank.peak_memory_bytes for rank in prediction.ranks) if prediction else None,
        stages_per_rank=len(made.stages) // made.pp if made is not None else None,
        fits=choice.fits,
        reason=choice.reason,
        bound_s=proof.bound_s if proof is not None else None,
    )


def schedule_table(plan: Plan, rows: Sequence[ScheduleRow]) -> Table:
    """One row per schedule, fastest first, then those that do not fit or apply."""
    numbers = ("step time", "bubble", "peak memory", "chunks")
    result = table(f"Schedules of {plan.scenario.name}", "schedule", *numbers, "note", right=numbers)
    for row in sorted(rows, key=lambda row: (not row.fits, row.step_time_s or float("inf"))):
        if row.step_time_s is None or row.bubble is None or row.peak_memory_bytes is None:
            result.add_row(row.schedule, "-", "-", "-", "-", row.reason)
            continue
        note = row.reason
        if row.bound_s is not None and row.pipeline_s:
            note = f"no order of these stages has a pipeline below {format_seconds(row.bound_s)}"
        result.add_row(
            row.schedule,
            format_seconds(row.step_time_s),
            f"{row.bubble:.1%}",
            format_bytes(row.peak_memory_bytes),
            str(row.stages_per_rank),
            note,
        )
    return result
