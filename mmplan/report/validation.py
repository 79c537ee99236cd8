"""The page of `mmplan validate`: verdicts, and the measured step under the predicted one."""

from pathlib import Path
from tempfile import TemporaryDirectory

from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction, RankPrediction
from mmplan.report.gantt import plot_gantt
from mmplan.report.page import heading, html_table, paragraph, picture, write_page
from mmplan.report.tables import loss_text, run_table, stage_table, validation_table
from mmplan.runtime.measurement import Measurement
from mmplan.runtime.validate import Validation, predict_run
from mmplan.units import format_seconds


def validation_page(plan: Plan, run: Measurement, validation: Validation, path: Path) -> None:
    """Write one offline page.

    Raises:
        InputError: the page cannot be written.
    """
    planned, replayed = predict_run(plan, run)
    charts = (
        ("Predicted with the plan's cost model", planned),
        ("Replayed with the measured compute times", replayed),
        ("Measured", measured_step(run)),
    )
    parts = [paragraph(_sentence(run, validation)), html_table(validation_table(validation)), heading("The step")]
    with TemporaryDirectory() as folder:
        for index, (title, prediction) in enumerate(charts):
            png = Path(folder) / f"{index}.png"
            plot_gantt(plan, prediction, png, title=title)
            parts.append(picture(png, title))
    parts += [heading("The run"), paragraph(loss_text(run)), html_table(run_table(run)), html_table(stage_table(plan))]
    write_page(path, f"{plan.scenario.name}: measured against predicted", parts)


def measured_step(run: Measurement) -> Prediction:
    """The recorded step in the form of a prediction, without transfers and memory over time."""
    return Prediction(
        step_time_s=run.step_time_s,
        pipeline_s=run.pipeline_s,
        bubble=run.bubble,
        ranks=tuple(
            RankPrediction(
                rank=rank.rank,
                stage=rank.stage,
                replica=rank.replica,
                busy_s=rank.busy_s,
                bubble=rank.bubble,
                sent_bytes=rank.sent_bytes,
                received_bytes=0,
                reduce_bytes=rank.reduce_bytes,
                transfer_s=rank.transfer_s,
                reduce_s=rank.reduce_s,
                peak_memory_bytes=rank.peak_memory_bytes,
                peak_buffer_bytes=0,
                memory_steps=(),
            )
            for rank in run.ranks
        ),
        timeline=run.timeline,
    )


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
