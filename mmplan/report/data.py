"""`mmplan data`: token counts, step times of each composition, and the advice, as tables, document and picture."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from mmplan.files import write_file
from mmplan.planner.advice import Advice
from mmplan.planner.data_study import DataStudy
from mmplan.planner.step_times import StepTimes
from mmplan.planner.token_counts import TokenCounts
from mmplan.report.documents import Document, values
from mmplan.report.tables import table
from mmplan.scenario.scenario import Scenario
from mmplan.units import format_bytes, format_seconds

_SHADES = ("#999999", "#4477AA", "#228833")


def data_document(scenario: Scenario, counts: Sequence[TokenCounts], study: DataStudy) -> Document:
    """Everything the tables show, and every step's seconds."""
    advice = study.advice
    return {
        "schema": "mmplan.data/1",
        "scenario": scenario.name,
        "tokens": values(list(counts)),
        "compositions": [
            {
                **values(one),
                "mean_s": one.mean_s,
                "error_s": one.error_s,
                "p50_s": one.quantile_s(0.5),
                "p95_s": one.quantile_s(0.95),
                "p99_s": one.quantile_s(0.99),
            }
            for one in study.times
        ],
        "advice": None if advice is None else values(advice),
    }


def data_tables(scenario: Scenario, counts: Sequence[TokenCounts], study: DataStudy) -> list[Table | str]:
    """Tokens, and for a plan its compositions and the advice."""
    parts: list[Table | str] = [token_table(scenario, counts, study.microbatch_size)]
    if study.advice is not None:
        parts += [composition_table(study.times), advice_text(study.advice)]
        used = study.advice.composition
        parts += [memory_text(one) for one in study.times if one.composition == used and not one.fits]
    return parts


def token_table(scenario: Scenario, counts: Sequence[TokenCounts], microbatch_size: int) -> Table:
    """One row per module."""
    sample, microbatch = ("mean", "P50", "P95", "P99", "most"), ("mean in mb", "P95 in mb", "most in mb")
    numbers = (*sample, *microbatch, "mb without", "replicas differ")
    title = f"Tokens of {scenario.name}: per sample, and per microbatch (mb) of {microbatch_size} in a row"
    result = table(title, "module", *numbers, right=numbers)
    for one in counts:
        tokens = (one.mean, one.p50, one.p95, one.p99, one.most)
        tokens = (*tokens, one.microbatch_mean, one.microbatch_p95, one.microbatch_most)  # type: ignore[assignment]
        result.add_row(one.module, *(f"{n:,.0f}" for n in tokens), f"{one.lacking:.1%}", f"{one.differing:.1%}")
    return result


def composition_table(times: Sequence[StepTimes]) -> Table:
    """One row per composition: step time over the data, and how uneven its microbatches are."""
    modalities = list(dict.fromkeys(modality for one in times for modality in one.imbalance))
    numbers = (
        "mean",
        "± error",
        "P50",
        "P95",
        "P99",
        "against in order",
        "peak memory",
        "fits",
        *(f"largest {m}" for m in modalities),
    )
    title = f"Step time over {len(times[0].step_s)} drawn steps; largest microbatch over the mean one"
    result = table(title, "composition", *numbers, right=numbers)
    for one in times:
        seconds = (one.mean_s, one.error_s, one.quantile_s(0.5), one.quantile_s(0.95), one.quantile_s(0.99))
        change = one.mean_s / times[0].mean_s - 1
        ratios = (f"{one.imbalance[m]:.2f}" if m in one.imbalance else "-" for m in modalities)
        memory = (format_bytes(one.peak_memory_bytes), "yes" if one.fits else "no")
        result.add_row(one.composition, *map(format_seconds, seconds), f"{change:+.1%}", *memory, *ratios)
    return result


def advice_text(advice: Advice) -> str:
    """One sentence."""
    if advice.composition == "in order":
        return "[bold]advice[/bold]: keep the order of the data; no composition saves 1 % of a step for certain"
    what = {"reorder": "reorder the microbatches of each replica", "balance": "balance samples over microbatches"}
    return (
        f"[bold]advice[/bold]: {what[advice.composition]} (composition: {advice.composition}): {advice.gain:.1%} of a "
        f"step; it pays while composing costs less than {format_seconds(advice.break_even_s)} a step"
    )


def memory_text(times: StepTimes) -> str:
    """For a composition that passes the memory: the plan was made for one large microbatch among mean ones."""
    return (
        f"[bold]memory[/bold]: in the fullest of {len(times.step_s)} steps a rank holds "
        f"{format_bytes(times.peak_memory_bytes)}, more than it may use: the plan fits mean microbatches and one at "
        "the 99th percentile; give the scenario more `constraints.memory_headroom` and optimize again"
    )


def plot_data(scenario: Scenario, counts: Sequence[TokenCounts], times: Sequence[StepTimes], path: Path) -> None:
    """Write a PNG: tokens of each module by quantile, and the distribution of step times per composition."""
    figure = Figure(figsize=(12, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    tokens_axes, steps_axes = figure.subplots(1, 2)
    rows = np.arange(len(counts))
    for offset, (label, name) in enumerate((("mean", "mean"), ("P95", "p95"), ("most", "most"))):
        lengths = [getattr(one, name) for one in counts]
        tokens_axes.barh(rows + 0.25 * (offset - 1), lengths, height=0.25, label=label, color=_SHADES[offset])
    tokens_axes.set_yticks(rows, [one.module for one in counts])
    tokens_axes.invert_yaxis()
    tokens_axes.set_xlabel("tokens per sample")
    tokens_axes.legend(frameon=False, fontsize=8)
    for shade, one in zip(_SHADES, times, strict=False):
        ordered = np.sort(one.step_s)
        label = f"{one.composition}: {format_seconds(one.mean_s)}, P99 {format_seconds(one.quantile_s(0.99))}"
        steps_axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", color=shade, label=label)
    if times:
        steps_axes.legend(frameon=False, fontsize=8, loc="lower right")
        steps_axes.set_ylabel("fraction of steps that are quicker")
        steps_axes.xaxis.set_major_formatter(lambda time_s, _: format_seconds(time_s) if time_s else "0")
        steps_axes.set_xlabel("step time")
    else:
        steps_axes.set_axis_off()
    for axes in (tokens_axes, steps_axes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(scenario.name, fontsize=12, fontweight="bold", x=0.01, ha="left")
    png = BytesIO()
    figure.savefig(png, format="png")
    write_file(path, png.getvalue())
