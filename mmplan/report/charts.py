"""Bar charts that put plans side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mmplan.planner.prediction import Prediction
from mmplan.report.summary import PlanSummary
from mmplan.units import format_seconds, gibibytes

_COMPUTE, _BUBBLE, _FINISH, _USED, _FREE = "#2563a8", "#d9d9d9", "#8e5ea2", "#2a9d8f", "#e9ecef"

_NAME_LENGTH = 32


def plot_comparison(summaries: Sequence[PlanSummary], predictions: Mapping[str, Prediction], path: Path) -> None:
    """Write a PNG: left where a mean rank's time goes in one step, right the fullest rank's memory."""
    figure = Figure(figsize=(11, 0.55 * len(summaries) + 1.9), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    time_axes, memory_axes = figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
    names = [shortened(summary.name) for summary in summaries]
    rows = range(len(summaries))
    steps = [predictions[summary.name] for summary in summaries]
    busy_s = [sum(rank.busy_s for rank in step.ranks) / len(step.ranks) for step in steps]
    pipeline_s = [step.pipeline_s for step in steps]
    idle_s = [whole - busy for whole, busy in zip(pipeline_s, busy_s, strict=True)]
    finish_s = [step.step_time_s - step.pipeline_s for step in steps]
    time_axes.barh(rows, busy_s, color=_COMPUTE, label="compute")
    time_axes.barh(rows, idle_s, left=busy_s, color=_BUBBLE, label="bubble")
    time_axes.barh(rows, finish_s, left=pipeline_s, color=_FINISH, label="reduce and update after the pipeline")
    time_axes.set_xlabel("one step of a mean rank")
    time_axes.xaxis.set_major_formatter(lambda time_s, _: format_seconds(time_s) if time_s else "0")
    _legend_above(time_axes)
    time_axes.set_yticks(rows, names)
    time_axes.invert_yaxis()
    used_gib = [gibibytes(summary.worst_memory_bytes) for summary in summaries]
    capacity_gib = [gibibytes(summary.capacity_bytes) for summary in summaries]
    memory_axes.barh(rows, capacity_gib, color=_FREE, label="usable")
    memory_axes.barh(rows, used_gib, color=_USED, label="used", height=0.5)
    memory_axes.set_xlabel("memory of the fullest rank (GiB)")
    _legend_above(memory_axes)
    figure.savefig(path, format="png")


def shortened(name: str) -> str:
    """A long name without its middle: plans often differ at the end only."""
    if len(name) <= _NAME_LENGTH:
        return name
    half = _NAME_LENGTH // 2 - 1
    return f"{name[:half]}…{name[-half:]}"


def _legend_above(axes: Axes) -> None:
    """Outside the bars, which may fill the axes."""
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, frameon=False, borderaxespad=0.2)
