"""The JSON documents behind `--json`: one per command, versioned by `schema`, described in docs/json.md."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from mmplan.planner.finding import Finding
from mmplan.planner.interval import StepInterval
from mmplan.planner.not_searched import not_searched
from mmplan.planner.plan import Plan, plan_document
from mmplan.planner.prediction import Prediction
from mmplan.planner.recipes import PlannedRecipe
from mmplan.planner.result import OptimizeResult
from mmplan.report.borders import plan_borders, plan_handovers
from mmplan.report.gradients import gradients_document
from mmplan.report.interval import interval_values
from mmplan.report.recipes import column_name
from mmplan.report.schedules import ScheduleRow
from mmplan.report.summary import PlanSummary, summarise
from mmplan.report.utilisation import plan_utilisation
from mmplan.runtime.gradient_differences import Comparison
from mmplan.runtime.measurement import Measurement, run_document
from mmplan.runtime.validate import Validation
from mmplan.scenario.catalogue import CatalogueDevice
from mmplan.scenario.layer_ids import shorten_ids

Document = dict[str, Any]


def values(item: Any) -> Any:
    """A frozen dataclass, or tuples and dicts of them, as JSON values."""
    if is_dataclass(item) and not isinstance(item, type):
        return {field.name: values(getattr(item, field.name)) for field in fields(item)}
    if isinstance(item, dict):
        return {str(key): values(value) for key, value in item.items()}
    if isinstance(item, (tuple, list)):
        return [values(entry) for entry in item]
    return item


def optimize_document(result: OptimizeResult, summary: PlanSummary, interval: StepInterval) -> Document:
    """Certificate, counts, runner-ups, and the plan as in plan.json."""
    runner_ups = [{**values(other), "configuration": str(other.configuration)} for other in result.runner_ups]
    return {
        "schema": "mmplan.optimize/1",
        "status": result.status,
        "objective": result.objective,
        "objective_s": result.plan.certificate.objective_s,
        "bound_s": result.bound_s,
        "gap": result.gap,
        "wall_s": result.wall_s,
        "chunks": _chunk_values(result.plan),
        "any_schedule": _any_schedule_values(summary),
        "fewer_devices": values(result.fewer),
        "not_searched": [] if result.status == "given" else values(list(not_searched(result.plan.scenario))),
        "considered": values(result.considered),
        "proofs": list(result.proofs),
        "summary": values(summary),
        **interval_values(interval),
        "runner_ups": runner_ups,
        "plan": plan_document(result.plan),
    }


def _chunk_values(plan: Plan) -> dict[str, float] | None:
    """Of a plan in several chunks per rank that no closed form describes: its step, and the bound of any schedule."""
    proof = plan.chunk_certificate
    return None if proof is None else {"step_s": proof.step_s, "bound_s": proof.bound_s, "gap": proof.gap}


def _any_schedule_values(summary: PlanSummary) -> dict[str, float] | None:
    """The simulated step against the bound of any schedule; null where that is not known."""
    if summary.any_schedule_s is None or summary.any_schedule_gap is None:
        return None
    return {"step_s": summary.step_time_s, "bound_s": summary.any_schedule_s, "gap": summary.any_schedule_gap}


def hardware_document(devices: Sequence[CatalogueDevice]) -> Document:
    return {"schema": "mmplan.hardware/1", "devices": values(list(devices))}


def simulate_document(plan: Plan, prediction: Prediction, interval: StepInterval) -> Document:
    """Stages and ranks of one simulated step; the timeline goes to `--trace`."""
    ranks = [{k: v for k, v in values(rank).items() if k != "memory_steps"} for rank in prediction.ranks]
    return {
        "schema": "mmplan.simulate/1",
        "scenario": plan.scenario.name,
        "step_time_s": prediction.step_time_s,
        **interval_values(interval),
        "pipeline_s": prediction.pipeline_s,
        "bubble": prediction.bubble,
        "summary": values(summarise(plan.scenario.name, plan, prediction)),
        "stages": stage_values(plan),
        "borders": values(list(plan_borders(plan))),
        "handovers": values(list(plan_handovers(plan))),
        "ranks": ranks,
        "utilisation": values(plan_utilisation(plan, prediction)),
    }


def schedules_document(plan: Plan, rows: Sequence[ScheduleRow]) -> Document:
    """A plan under every schedule."""
    return {"schema": "mmplan.schedules/1", "scenario": plan.scenario.name, "schedules": values(list(rows))}


def stage_values(plan: Plan) -> list[Document]:
    """Stages with short layer ids and their ranks."""
    return [
        {**values(stage), "layers": list(shorten_ids(stage.layers)), "ranks": list(plan.stage_ranks(index))}
        for index, stage in enumerate(plan.stages)
    ]


def compare_document(summaries: Sequence[PlanSummary], recipes: Sequence[PlannedRecipe] = ()) -> Document:
    """The plans, and the recipes that some of them are of."""
    return {
        "schema": "mmplan.compare/1",
        "plans": values(list(summaries)),
        "recipes": [recipe_values(recipe) for recipe in recipes],
    }


def recipe_values(planned: PlannedRecipe) -> Document:
    """A recipe as its scenario has it, and the name of its plan among `plans` (null: none can be made)."""
    made = {"plan": column_name(planned) if planned.plan is not None else None}
    return {**values(planned.recipe), **made, "reason": planned.reason, "note": planned.note}


def check_document(
    plan: Plan,
    findings: Sequence[Finding],
    not_executed: str | None,
    notes: Sequence[str],
    gradients: Comparison | None = None,
) -> Document:
    return {
        "schema": "mmplan.check/1",
        "scenario": plan.scenario.name,
        "sound": not findings,
        "findings": values(list(findings)),
        "not_executed": not_executed,
        "notes": list(notes),
        "gradients": None if gradients is None else gradients_document(gradients),
    }


def execute_document(measurement: Measurement) -> Document:
    """run.json as it is, under its schema name."""
    return {"schema": "mmplan.run/1", **run_document(measurement)}


def validate_document(validation: Validation) -> Document:
    return {"schema": "mmplan.validate/1", "passed": validation.passed, **values(validation)}
