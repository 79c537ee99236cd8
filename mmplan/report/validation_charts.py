"""Pictures of a validation: from the predicted to the measured step, and both steps over each other."""

from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from mmplan.files import write_file
from mmplan.planner.modalities import stage_modality
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction
from mmplan.report.palette import TRANSFER, colour
from mmplan.report.validation_tables import decomposition_parts, signed
from mmplan.runtime.validate import Validation
from mmplan.units import format_seconds

_TOTAL, _LONGER, _SHORTER = "#4477AA", "#EE6677", "#228833"
_PARTS = (
    ("compute", "compute_s", "#4477AA"),
    ("update", "update_s", "#AAAAAA"),
    ("exposed communication", "exposed_s", TRANSFER),
    ("overhead", "overhead_s", "#CCBB44"),
    ("bubble", "bubble_s", "#E9ECEF"),
)
_CUT = 0.3  # changes smaller than this part of a step are shown on an axis that does not begin at zero
_ROW, _GAP = 0.38, 0.02  # of a line: each rank has two half rows, the predicted one above


def plot_waterfall(validation: Validation, path: Path) -> None:
    """Write a PNG: bars that lead from the predicted step to the measured one, and the parts of the mean rank."""
    figure = Figure(figsize=(13.0, 3.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    _draw_waterfall(left, validation)
    _draw_parts(right, validation)
    _save(figure, path)


def _draw_waterfall(axes: Axes, validation: Validation) -> None:
    found = validation.decomposition
    names, at_s = ["predicted"], found.planned_s
    axes.bar(0, found.planned_s, color=_TOTAL, width=0.6)
    tops, bottoms = [found.planned_s], list[float]()
    labels = [format_seconds(found.planned_s)]
    for place, (name, seconds, _) in enumerate(decomposition_parts(found), start=1):
        axes.bar(place, seconds, bottom=at_s, color=_LONGER if seconds > 0 else _SHORTER, width=0.6)
        axes.plot([place - 0.7, place + 0.3], [at_s, at_s], color="#888888", linewidth=0.8)
        tops.append(max(at_s, at_s + seconds))
        bottoms.append(min(at_s, at_s + seconds))
        labels.append(signed(seconds))
        names.append(name)
        at_s += seconds
    axes.bar(len(names), found.measured_s, color=_TOTAL, width=0.6)
    names.append("measured")
    tops.append(found.measured_s)
    labels.append(format_seconds(found.measured_s))
    for place, (top_s, label) in enumerate(zip(tops, labels, strict=True)):
        axes.annotate(label, (place, top_s), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(names)), names)
    low_s, high_s = min(found.planned_s, found.measured_s, *bottoms), max(tops)
    if high_s - low_s < _CUT * high_s:  # else the parts would be too low to see
        axes.set_ylim(max(0.0, low_s - (high_s - low_s)), high_s + 0.3 * (high_s - low_s))
    else:
        axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(lambda time_s, _: format_seconds(time_s) if time_s else "0")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("from the predicted to the measured step", fontsize=9, loc="left", color="#555555")


def _draw_parts(axes: Axes, validation: Validation) -> None:
    """Two stacked bars."""
    for row, which in enumerate(("planned", "measured")):
        parts, left_s = [getattr(part, which) for part in validation.parts], 0.0
        for name, field, fill in _PARTS:
            mean_s = sum(getattr(part, field) for part in parts) / len(parts)
            axes.barh(row, mean_s, left=left_s, color=fill, label=name if row == 0 else None, height=0.6)
            left_s += mean_s
    axes.set_yticks((0, 1), ("predicted", "measured"))
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda time_s, _: format_seconds(time_s) if time_s else "0")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title("the step of a mean rank", fontsize=9, loc="left", color="#555555")
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)


def plot_overlay(plan: Plan, planned: Prediction, measured: Prediction, path: Path) -> None:
    """Write a PNG with two half rows per rank on one axis: the predicted step, and below it the measured one."""
    rows = len(planned.ranks)
    figure = Figure(figsize=(13.0, min(max(0.5 * rows, 1.2), 12.0) + 1.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    modalities = [stage_modality(plan, stage) for stage in range(len(plan.stages))]
    row_of = {rank.rank: row for row, rank in enumerate(planned.ranks)}
    longest_s = max(planned.step_time_s, measured.step_time_s)
    for below, step in enumerate((planned, measured)):
        bars: dict[str, list[list[tuple[float, float]]]] = {}
        for item in step.timeline:
            if item.action.kind in ("SEND", "RECV"):
                continue
            low = row_of[item.rank] + (_GAP if below else -_ROW - _GAP)
            fill = colour(item.action.kind, modalities[item.action.stage])
            corners = [(item.start_s, low), (item.end_s, low), (item.end_s, low + _ROW), (item.start_s, low + _ROW)]
            bars.setdefault(fill, []).append(corners)
        for fill, boxes in bars.items():
            axes.add_collection(PolyCollection(boxes, facecolors=fill, edgecolors="white", linewidths=0.3))
        axes.axvline(step.step_time_s, color="#333333", linestyle="--" if below else ":", linewidth=1)
    axes.set_xlim(0.0, 1.01 * longest_s)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_yticks(range(rows), [f"rank {rank.rank}" for rank in planned.ranks], fontsize=8 if rows <= 24 else 5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda time_s, _: format_seconds(time_s) if time_s else "0")
    ends = f"dotted: its end at {format_seconds(planned.step_time_s)}"
    below_ends = f"dashed: its end at {format_seconds(measured.step_time_s)}"
    axes.set_title(
        f"of each rank predicted above ({ends}), measured below ({below_ends})", fontsize=9, loc="left", color="#555555"
    )
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    png = BytesIO()
    figure.savefig(png, format="png")
    write_file(path, png.getvalue())
