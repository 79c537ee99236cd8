"""Bar charts that put plans side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mmplan.planner.prediction import Prediction
from mmplan.report.summary import PlanSummary

_COMPUTE, _BUBBLE, _FINISH, _USED, _FREE = "#2563a8", "#d9d9d9", "#8e5ea2", "#2a9d8f", "#e9ecef"


def plot_comparison(summaries: Sequence[PlanSummary], predictions: Mapping[str, Prediction], path: Path) -> None:
    """Write a PNG: left where a mean rank's time goes in one step, right the fullest rank's memory."""
    figure = Figure(figsize=(11, 0.55 * len(summaries) + 1.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    time_axes, memory_axes = figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
    names = [summary.name for summary in summaries]
    scale, unit = (1e3, "ms") if max(s.step_time_s for s in summaries) < 1.0 else (1.0, "s")
    busy, idle, finish = [], [], []
    for summary in summaries:
        prediction = predictions[summary.name]
        busy.append(scale * sum(rank.busy_s for rank in prediction.ranks) / len(prediction.ranks))
        idle.append(scale * prediction.pipeline_s - busy[-1])
        finish.append(scale * (prediction.step_time_s - prediction.pipeline_s))
    time_axes.barh(names, busy, color=_COMPUTE, label="compute")
    time_axes.barh(names, idle, left=busy, color=_BUBBLE, label="bubble")
    left = [b + i for b, i in zip(busy, idle, strict=True)]
    time_axes.barh(names, finish, left=left, color=_FINISH, label="reduce and update after the pipeline")
    time_axes.set_xlabel(f"mean rank, one step ({unit})")
    time_axes.legend(fontsize=8, loc="lower right")
    time_axes.invert_yaxis()
    used = [summary.worst_memory_bytes / 2**30 for summary in summaries]
    capacity = [summary.capacity_bytes / 2**30 for summary in summaries]
    memory_axes.barh(names, capacity, color=_FREE, label="usable")
    memory_axes.barh(names, used, color=_USED, label="used", height=0.5)
    memory_axes.set_xlabel("memory of the fullest rank (GiB)")
    memory_axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, format="png")
