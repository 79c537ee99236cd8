"""A picture of one step: what every rank does when, and below it the memory of every rank over time."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction, TimedAction
from mmplan.report.palette import BACKWARD, FORWARD, REDUCE, STEP, TRANSFER, WEIGHT_GRADIENT, colour
from mmplan.units import format_bytes, format_seconds

_GIB = 2.0**30
_LABEL_FRACTION = 0.012  # a bar narrower than this part of the axis has no room for its microbatch number


def plot_gantt(plan: Plan, prediction: Prediction, path: Path, *, title: str = "") -> None:
    """Write a PNG: one row per listed rank, rank 0 on top, transfers as a thin strip below their sender's bars.

    Args:
        prediction: of the plan, or the timeline of a run in the same form; without memory steps the lower part is
            left out.
        title: goes before step time and bubble; the scenario's name when empty.
    """
    with_memory = any(rank.memory_steps for rank in prediction.ranks)
    rows = len(prediction.ranks)
    rows_inches = min(0.34 * rows + 0.4, 22.0)
    memory_inches = 2.1 if with_memory else 0.0
    figure = Figure(figsize=(13.0, rows_inches + memory_inches + 1.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    heights = [rows_inches, memory_inches] if with_memory else [rows_inches]
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    scale, unit = (1e3, "ms") if prediction.step_time_s < 1.0 else (1.0, "s")
    _draw_rows(axes[0], plan, prediction, scale)
    if with_memory:
        _draw_memory(axes[1], plan, prediction, scale)
    axes[-1].set_xlabel(f"time in the step ({unit})")
    name = title or plan.scenario.name
    numbers = f"step {format_seconds(prediction.step_time_s)}, bubble {100 * prediction.bubble:.1f} %"
    shape = f"{plan.schedule}, pp {plan.pp} x dp {plan.dp} x tp {plan.tp}, {plan.microbatches} microbatches"
    figure.suptitle(f"{name}: {numbers}", fontsize=13, fontweight="bold", x=0.01, ha="left")
    axes[0].set_title(shape, fontsize=9, loc="left", color="#555555")
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png")
    partial.replace(path)


def stage_modality(plan: Plan, stage: int) -> str:
    """The modality that most layers of the stage belong to."""
    counts: dict[str, int] = {}
    for layer in plan.stages[stage].layers:
        modality = plan.scenario.model.module(layer.rsplit(".", 1)[0]).modality
        counts[modality] = counts.get(modality, 0) + 1
    return max(counts, key=lambda modality: counts[modality])


def _draw_rows(axes: Axes, plan: Plan, prediction: Prediction, scale: float) -> None:
    """One row of bars per rank."""
    row_of = {rank.rank: row for row, rank in enumerate(prediction.ranks)}
    modality = [stage_modality(plan, stage) for stage in range(plan.pp)]
    bars: dict[str, list[list[tuple[float, float]]]] = {}
    narrowest_s = _LABEL_FRACTION * prediction.step_time_s
    for item in prediction.timeline:
        kind, row = item.action.kind, row_of[item.rank]
        if kind == "RECV":
            continue
        low, high = (row + 0.36, row + 0.44) if kind == "SEND" else (row - 0.36, row + 0.33)
        left, right = item.start_s * scale, item.end_s * scale
        fill = colour(kind, modality[item.action.stage])
        bars.setdefault(fill, []).append([(left, low), (right, low), (right, high), (left, high)])
        if kind in "FBIW" and item.end_s - item.start_s > narrowest_s and len(prediction.ranks) <= 40:
            ink = "black" if kind == "F" else "white"
            axes.text(
                (left + right) / 2,
                row - 0.02,
                str(item.action.microbatch),
                color=ink,
                ha="center",
                va="center",
                fontsize=7,
            )
    for fill, corners in bars.items():
        edge = "none" if fill == TRANSFER else "white"
        axes.add_collection(PolyCollection(corners, facecolors=fill, edgecolors=edge, linewidths=0.4))
    axes.set_xlim(0.0, prediction.step_time_s * scale)
    axes.set_ylim(len(prediction.ranks) - 0.4, -0.6)
    axes.set_yticks(range(len(prediction.ranks)), [_row_name(plan, rank.rank, rank.stage) for rank in prediction.ranks])
    axes.tick_params(axis="y", labelsize=8 if len(prediction.ranks) <= 24 else 5, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(
        handles=_legend(prediction.timeline, modality),
        loc="lower left",
        bbox_to_anchor=(0.35, 1.0),
        ncols=8,
        frameon=False,
        fontsize=8,
    )


def _row_name(plan: Plan, rank: int, stage: int) -> str:
    ranks = f"rank {rank}" if plan.tp == 1 else f"ranks {rank}-{rank + plan.tp - 1}"
    layers = plan.stages[stage].layers
    return f"{ranks}  {layers[0]}" if len(layers) == 1 else f"{ranks}  {layers[0]} … {layers[-1]}"


def _legend(timeline: Sequence[TimedAction], modality: Sequence[str]) -> list[Patch]:
    """Only what occurs."""
    kinds = {item.action.kind for item in timeline}
    handles = []
    for name in dict.fromkeys(modality):
        handles.append(Patch(color=FORWARD[name], label=f"{name} forward"))
        if kinds & {"B", "I"}:
            handles.append(Patch(color=BACKWARD[name], label=f"{name} backward"))
    rest = {"W": (WEIGHT_GRADIENT, "weight gradient"), "SEND": (TRANSFER, "transfer"), "REDUCE": (REDUCE, "all-reduce")}
    handles += [Patch(color=fill, label=label) for kind, (fill, label) in rest.items() if kind in kinds]
    if "STEP" in kinds:
        handles.append(Patch(color=STEP, label="optimizer"))
    return handles


def _draw_memory(axes: Axes, plan: Plan, prediction: Prediction, scale: float) -> None:
    """One stepped line per rank in the colours of a map from first to last stage; the least capacity dashed."""
    shades = colormaps["viridis"]
    for rank in prediction.ranks:
        if not rank.memory_steps:
            continue
        times = [time_s * scale for time_s, _ in rank.memory_steps] + [prediction.step_time_s * scale]
        held = [step_bytes / _GIB for _, step_bytes in rank.memory_steps]
        shade = shades(0.9 * rank.stage / max(plan.pp - 1, 1))
        label = f"stage {rank.stage}" if rank.replica == 0 and plan.pp <= 8 else None
        axes.step(times, [*held, held[-1]], where="post", color=shade, linewidth=1.1, label=label)
    capacity_bytes = min(stage.capacity_bytes for stage in plan.stages)
    peak_bytes = max(rank.peak_memory_bytes for rank in prediction.ranks)
    if 0 < capacity_bytes < 2 * peak_bytes:
        axes.axhline(capacity_bytes / _GIB, color="#BB5566", linestyle="--", linewidth=1)
    where = f"peak {format_bytes(peak_bytes)} of {format_bytes(capacity_bytes)} per device"
    axes.set_title(where, fontsize=9, loc="left", color="#555555")
    axes.set_ylabel("memory (GiB)", fontsize=9)
    axes.set_ylim(bottom=0.0)
    axes.spines[["top", "right"]].set_visible(False)
    if plan.pp <= 8:
        axes.legend(loc="lower right", ncols=4, fontsize=7, frameon=False)
