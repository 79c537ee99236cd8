"""Table, document and picture of `mmplan pareto`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mmplan.errors import InputError
from mmplan.planner.objective import ObjectiveName
from mmplan.planner.objective_value import MEASURES, Measure
from mmplan.planner.pareto_front import AXES, Axis, FrontPoint
from mmplan.planner.plan import save_plan
from mmplan.planner.plan_cost import cost_of, tokens_of
from mmplan.report.alternatives import degrees_text
from mmplan.report.pictures import new_figure, save_png
from mmplan.report.tables import cost_text, table
from mmplan.scenario.document import did_you_mean
from mmplan.units import format_bytes, format_seconds, gibibytes

_COUNT: dict[Axis, Callable[[float], str]] = {"memory": format_bytes, "devices": lambda count: f"{count:,.0f}"}
_LABEL: dict[Axis, str] = {"memory": "memory of the fullest rank (GiB)", "devices": "devices"}


def axes_of(word: str, objective: ObjectiveName = "step-time") -> tuple[Axis, ...]:
    """What the objective is held against: `memory`, `devices` or `both`; the number of devices against memory alone.

    Raises:
        InputError: another word, or devices against devices.
    """
    found = AXES if word == "both" else tuple(axis for axis in AXES if axis == word)
    if objective == "devices":
        if word == "devices":
            raise InputError("--objective devices counts what --against devices limits: use --against memory")
        found = tuple(axis for axis in found if axis == "memory")
    if not found:
        hint = did_you_mean(word, (*AXES, "both"))
        raise InputError(f"--against: expected memory, devices or both, found '{word}'{hint}")
    return found


def pareto_tables(name: str, points: Sequence[FrontPoint]) -> list[Table]:
    """One table per axis; what another plan beats has no mark."""
    found = []
    for axis in AXES:
        own = [point for point in points if point.axis == axis]
        if not own:
            continue
        costs = [cost_of(point.plan, point.step_s) for point in own]
        priced = ("cost of a million tokens",) if any(costs) else ()
        measure, step = MEASURES[own[0].objective], _beside(own[0].objective)
        numbers = ("at most", "needs", measure.says, "bound", "gap", *step, *priced)
        title = f"{measure.says.capitalize()} of {name} (closed form) against {axis}"
        result = table(title, *numbers, "front", "plan", right=numbers)
        for point, cost in zip(own, costs, strict=True):
            status = point.plan.certificate.status
            result.add_row(
                _COUNT[axis](point.limit),
                _COUNT[axis](point.cost),
                measure.text(point.value),
                measure.text(point.bound),
                f"{_gap(point):.2%}" + ("" if status == "optimal" else f" ({status})"),
                *[text(point) for text in step.values()],
                *([cost_text(cost.per_million_tokens) if cost else "-"] if priced else []),
                "" if point.dominated else "*",
                degrees_text(point.plan),
            )
        found.append(result)
    return found


def _beside(objective: ObjectiveName) -> dict[str, Callable[[FrontPoint], str]]:
    """Columns that say the value in other words."""
    if MEASURES[objective] is MEASURES["step-time"]:
        return {}
    found: dict[str, Callable[[FrontPoint], str]] = {"step time": lambda point: format_seconds(point.step_s)}
    if objective == "device-time":
        found["tokens/s per device"] = lambda point: f"{tokens_of(point.plan.scenario) / point.value:,.0f}"
    return found


def _gap(point: FrontPoint) -> float:
    return (point.value - point.bound) / point.value if point.value > 0 else 0.0


def pareto_document(name: str, points: Sequence[FrontPoint], complete: bool) -> dict[str, Any]:
    """Bytes or devices by axis, seconds of the closed form, values of the objective; plans by their degrees."""
    return {
        "schema": "mmplan.pareto/1",
        "scenario": name,
        "complete": complete,
        "objective": points[0].objective if points else None,
        "points": [
            {
                "axis": point.axis,
                "limit": point.limit,
                "cost": point.cost,
                "value": point.value,
                "value_bound": point.bound,
                "objective_s": point.step_s,
                "bound_s": point.plan.certificate.bound_s,
                "gap": point.plan.certificate.gap,
                "status": point.plan.certificate.status,
                "dominated": point.dominated,
                "degrees": degrees_text(point.plan),
                "cost_per_step": cost.per_step if cost else None,
                "cost_per_million_tokens": cost.per_million_tokens if cost else None,
            }
            for point in points
            for cost in (cost_of(point.plan, point.step_s),)
        ],
    }


def save_front(name: str, points: Sequence[FrontPoint], folder: Path) -> None:
    """Write the plans of the front as NAME.AXIS-N.plan.json, N counted from the fastest."""
    for axis in AXES:
        front = [point for point in points if point.axis == axis and not point.dominated]
        for index, point in enumerate(front, start=1):
            save_plan(point.plan, folder / f"{name}.{axis}-{index}.plan.json")


def _ticks(measure: Measure) -> Callable[[float, float], str]:
    return lambda value, _: measure.text(value) if value else "0"


def plot_pareto(points: Sequence[FrontPoint], path: Path) -> None:
    """Write a PNG with one front per axis: plans, and down to the bound what is left unproven."""
    shown: list[Axis] = [axis for axis in AXES if any(point.axis == axis for point in points)]
    figure = new_figure(6.0 * max(1, len(shown)), 4.5)
    for column, axis in enumerate(shown):
        axes = figure.add_subplot(1, len(shown), column + 1)
        own = sorted((point for point in points if point.axis == axis), key=lambda point: point.cost)
        scaled: Callable[[float], float] = gibibytes if axis == "memory" else float
        front = [point for point in own if not point.dominated]
        axes.step(
            [scaled(point.cost) for point in front], [point.value for point in front], where="post", label="front"
        )
        left = [point.value - point.bound for point in own]
        axes.errorbar(
            [scaled(point.cost) for point in own],
            [point.value for point in own],
            yerr=[left, [0.0] * len(own)],
            fmt="o",
            capsize=3,
            label="plans, down to their bound",
        )
        axes.set_xlabel(_LABEL[axis])
        measure = MEASURES[own[0].objective]
        axes.set_ylabel(f"{measure.says}, closed form")
        axes.yaxis.set_major_formatter(_ticks(measure))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save_png(figure, path)
