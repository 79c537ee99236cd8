"""The page of `mmplan validate`: verdicts, the way from the predicted to the measured step, and both steps."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mmplan.planner.plan import Plan
from mmplan.report.gantt import plot_gantt
from mmplan.report.page import heading, html_table, paragraph, picture, write_page
from mmplan.report.tables import loss_text, run_table, stage_table
from mmplan.report.validation_charts import plot_overlay, plot_waterfall
from mmplan.report.validation_tables import (
    advice,
    decomposition_table,
    parts_table,
    prices_table,
    validation_table,
)
from mmplan.runtime.measurement import Measurement
from mmplan.runtime.recorded_steps import recorded_steps
from mmplan.runtime.validate import Validation
from mmplan.units import format_seconds

Draw = Callable[[Path], None]


def validation_page(plan: Plan, run: Measurement, validation: Validation, path: Path) -> None:
    """Write one offline page.

    Raises:
        InputError: the page cannot be written.
    """
    steps = recorded_steps(plan, run)
    over_each_other = "Predicted and measured over each other"
    charts = (
        ("Predicted with the plan's cost model", steps.planned),
        ("Replayed with the measured compute times", steps.replayed),
        ("Measured", steps.measured),
    )
    parts = [
        paragraph(_sentence(run, validation)),
        *_pictures([("From the predicted to the measured step", partial(plot_waterfall, validation))]),
        html_table(decomposition_table(validation.decomposition)),
        paragraph(advice(plan, validation)),
        heading(over_each_other),
        *_pictures([(over_each_other, partial(plot_overlay, plan, steps.planned, steps.measured))]),
        html_table(parts_table(validation)),
        html_table(prices_table(plan, validation.prices)),
        heading("Verdicts"),
        html_table(validation_table(validation)),
        heading("The step, three times"),
        *_pictures([(title, partial(plot_gantt, plan, step, title=title)) for title, step in charts]),
    ]
    parts += [heading("The run"), paragraph(loss_text(run)), html_table(run_table(run)), html_table(stage_table(plan))]
    write_page(path, f"{plan.scenario.name}: measured against predicted", parts)


def _pictures(charts: Sequence[tuple[str, Draw]]) -> list[str]:
    with TemporaryDirectory() as folder:
        png, made = Path(folder) / "chart.png", []
        for title, draw in charts:
            draw(png)
            made.append(picture(png, title))
        return made


def _sentence(run: Measurement, validation: Validation) -> str:
    kind = f"A rehearsal (compute stretched {run.time_scale:.3g} times)" if run.rehearsed else "A run"
    missed = sum(row.passed is False for row in validation.rows)
    verdict = "everything is within its threshold" if not missed else f"{missed} thresholds are missed"
    untimed = any(row.quantity == "step_time_s" and row.passed is None for row in validation.rows)
    if untimed:
        verdict += (
            f"; no verdict on bubble and step time, because there were {run.processes_per_core:.3g} processes per core "
            "(rehearse the plan for one)"
        )
    where = f"on {len(run.ranks)} ranks over {run.backend}, {run.device}, torch {run.torch_version}"
    return f"{kind} {where}: step {format_seconds(run.step_time_s)}; {verdict}."
