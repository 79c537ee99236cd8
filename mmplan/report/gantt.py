"""A picture of one step: what every rank does when, and below it memory and bytes on links over time."""

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mmplan.files import write_file
from mmplan.planner.modalities import stage_modality
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction, TimedAction
from mmplan.report.charts import shortened
from mmplan.report.communication import draw_communication
from mmplan.report.palette import BACKWARD, FORWARD, REDUCE, STEP, TRANSFER, WEIGHT_GRADIENT, colour
from mmplan.units import format_bytes, format_seconds

_LABEL_FRACTION = 0.012  # a bar narrower than this part of the axis has no room for its microbatch number
_LABEL_ROWS = 32  # nor has one of more rows than this
_NAMED_STAGES = 8  # more lines than this need no legend: the colours go from first to last pipeline rank
_MEMORY_TICKS = 4
_FOOT, _FOOT_COLOUR = 0.15, "#333333"  # below the bars of a rank's last chunk


def plot_gantt(plan: Plan, prediction: Prediction, path: Path, *, title: str = "") -> None:
    """Write a PNG: one row per listed rank, rank 0 on top, transfers as a thin strip below their sender's bars.

    Args:
        prediction: of the plan, or the timeline of a run in the same form; without memory steps that part is left
            out.
        title: goes before step time and bubble; the scenario's name when empty.
    """
    with_memory = any(rank.memory_steps for rank in prediction.ranks)
    rows_inches = min(max(0.42 * len(prediction.ranks), 1.0), 10.0)
    heights = [rows_inches, 2.2, 1.3] if with_memory else [rows_inches, 1.3]
    figure = Figure(figsize=(13.0, sum(heights) + 1.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    modalities = [stage_modality(plan, stage) for stage in range(len(plan.stages))]
    _draw_rows(axes[0], plan, prediction, modalities)
    if with_memory:
        _draw_memory(axes[1], plan, prediction)
    draw_communication(axes[-1], prediction.timeline)
    axes[-1].set_xlabel("time in the step")
    axes[-1].xaxis.set_major_formatter(lambda time_s, _: format_seconds(time_s) if time_s else "0")
    numbers = f"step {format_seconds(prediction.step_time_s)}, bubble {100 * prediction.bubble:.1f} %"
    heading = f"{title or plan.scenario.name}: {numbers}"
    figure.suptitle(heading, fontsize=13, fontweight="bold", x=0.01, ha="left")
    handles = _legend(prediction.timeline, modalities)
    figure.legend(handles=handles, loc="outside lower center", ncols=10, frameon=False, fontsize=8)
    png = BytesIO()
    figure.savefig(png, format="png")
    write_file(path, png.getvalue())


def _draw_rows(axes: Axes, plan: Plan, prediction: Prediction, modalities: Sequence[str]) -> None:
    """One row of bars per rank on a grey strip that shows where the rank is idle."""
    rows = len(prediction.ranks)
    row_of = {rank.rank: row for row, rank in enumerate(prediction.ranks)}
    axes.barh(range(rows), prediction.step_time_s, height=0.7, color="#F1F1F1")
    bars: dict[str, list[list[tuple[float, float]]]] = {}
    feet: list[list[tuple[float, float]]] = []
    for item in prediction.timeline:
        kind, row = item.action.kind, row_of[item.rank]
        if kind == "RECV":
            continue
        low, high = (row + 0.36, row + 0.46) if kind == "SEND" else (row - 0.35, row + 0.35)
        fill = colour(kind, modalities[item.action.stage])
        corners = [(item.start_s, low), (item.end_s, low), (item.end_s, high), (item.start_s, high)]
        bars.setdefault(fill, []).append(corners)
        foot = _FOOT * _chunk(plan, item.action.stage) if kind in "FBIW" else 0.0
        if foot:
            top = high - foot
            feet.append([(item.start_s, top), (item.end_s, top), (item.end_s, high), (item.start_s, high)])
        if kind in "FBIW" and rows <= _LABEL_ROWS:
            _label_bar(axes, item, row, prediction.step_time_s)
    for fill, boxes in bars.items():
        edge = fill if fill == TRANSFER else "white"
        axes.add_collection(PolyCollection(boxes, facecolors=fill, edgecolors=edge, linewidths=0.3))
    axes.add_collection(PolyCollection(feet, facecolors=_FOOT_COLOUR))
    axes.set_xlim(0.0, prediction.step_time_s)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_yticks(range(rows), [_row_name(plan, rank.rank, rank.stage) for rank in prediction.ranks])
    axes.tick_params(axis="y", labelsize=8 if rows <= 24 else 5, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    shape = f"{plan.schedule}, pp {plan.pp} x dp {plan.dp} x tp {plan.tp}, {plan.microbatches} microbatches"
    for mesh in plan.meshes:
        shape += f", {' and '.join(mesh.modules)} on {mesh}"
    if len(plan.stages) > plan.pp:
        shape += f", {len(plan.stages) // plan.pp} chunks per rank, later ones with a dark foot"
    axes.set_title(shape, fontsize=9, loc="left", color="#555555")


def _label_bar(axes: Axes, item: TimedAction, row: int, step_time_s: float) -> None:
    """The microbatch in a bar that is wide enough."""
    if item.end_s - item.start_s > _LABEL_FRACTION * step_time_s:
        ink = "black" if item.action.kind == "F" else "white"
        middle_s = (item.start_s + item.end_s) / 2
        axes.text(middle_s, row, str(item.action.microbatch), color=ink, ha="center", va="center", fontsize=7)


def _chunk(plan: Plan, stage: int) -> float:
    """Place of a stage among those of its rank, from 0 to 1."""
    stages = plan.stages_of(plan.row(stage))
    return stages.index(stage) / max(len(stages) - 1, 1)


def _row_name(plan: Plan, rank: int, stage: int) -> str:
    tp = plan.mesh(stage).tp
    ranks = f"rank {rank}" if tp == 1 else f"ranks {rank}-{rank + tp - 1}"
    return f"{ranks}  {' | '.join(_ends(plan.stages[chunk].layers) for chunk in plan.stages_of(plan.row(stage)))}"


def _ends(layers: Sequence[str]) -> str:
    """First and last layer."""
    ends = [shortened(layer) for layer in (layers[0], layers[-1])]
    return ends[0] if len(layers) == 1 else f"{ends[0]} … {ends[1]}"


def _legend(timeline: Sequence[TimedAction], modalities: Sequence[str]) -> list[Patch]:
    """Only what occurs."""
    kinds = {"REDUCE" if item.action.kind == "TIE" else item.action.kind for item in timeline}
    backward = {item.action.stage for item in timeline if item.action.kind in "BI"}
    handles = []
    for name in dict.fromkeys(modalities):
        handles.append(Patch(color=FORWARD[name], label=f"{name} forward"))
        if any(modalities[stage] == name for stage in backward):
            handles.append(Patch(color=BACKWARD[name], label=f"{name} backward"))
    rest = {
        "W": (WEIGHT_GRADIENT, "weight gradient"),
        "SEND": (TRANSFER, "transfer"),
        "REDUCE": (REDUCE, "all-reduce"),
        "STEP": (STEP, "optimizer"),
    }
    return handles + [Patch(color=fill, label=label) for kind, (fill, label) in rest.items() if kind in kinds]


def _draw_memory(axes: Axes, plan: Plan, prediction: Prediction) -> None:
    """One stepped line per rank, coloured from first to last pipeline rank; the capacity dashed when near."""
    shades = colormaps["viridis"]
    for rank in prediction.ranks:
        times_s = [time_s for time_s, _ in rank.memory_steps] + [prediction.step_time_s]
        held = [held_bytes for _, held_bytes in rank.memory_steps]
        row = plan.row(rank.stage)
        shade = shades(0.9 * row / max(plan.pp - 1, 1))
        label = f"pipeline rank {row}" if rank.replica == 0 else None
        if held:
            axes.step(times_s, [*held, held[-1]], where="post", color=shade, linewidth=1.1, label=label)
    capacity_bytes = min(stage.capacity_bytes for stage in plan.stages)
    peak_bytes = max(rank.peak_memory_bytes for rank in prediction.ranks)
    top_bytes = float(peak_bytes)
    if 0 < capacity_bytes < 2 * peak_bytes:
        axes.axhline(capacity_bytes, color="#BB5566", linestyle="--", linewidth=1)
        top_bytes = max(top_bytes, capacity_bytes)
    tick_bytes = 2 ** math.ceil(math.log2(top_bytes / _MEMORY_TICKS))
    ticks = [tick_bytes * index for index in range(math.ceil(top_bytes / tick_bytes) + 1)]
    axes.set_yticks(ticks, [format_bytes(tick) if tick else "0" for tick in ticks], fontsize=8)
    axes.set_ylim(0.0, 1.06 * top_bytes)
    where = (
        f"memory: peak {format_bytes(peak_bytes)} of {format_bytes(capacity_bytes)} that the plan may use per device"
    )
    axes.set_title(where, fontsize=9, loc="left", color="#555555")
    axes.spines[["top", "right"]].set_visible(False)
    if plan.pp <= _NAMED_STAGES:
        axes.legend(loc="lower right", ncols=4, fontsize=7, frameon=False)
