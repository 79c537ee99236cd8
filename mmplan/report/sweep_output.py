"""A sweep as a table, as CSV, as a document and as a picture."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from mmplan.files import write_file
from mmplan.planner.objective import ObjectiveName
from mmplan.report.documents import values
from mmplan.report.pictures import new_figure, save_png
from mmplan.report.sweep import READINGS, SweepRow, curves
from mmplan.report.tables import cost_text, table
from mmplan.units import format_seconds

COLUMNS = (
    "devices",
    "used_devices",
    "step_time_s",
    "samples_per_s",
    "tokens_per_s_per_device",
    "efficiency",
    "gap",
    "stage_bytes",
    "flops",
    "cost_per_step",
    "cost_per_million_tokens",
    "status",
    "degrees",
    "reason",
)


def sweep_tables(name: str, rows: Sequence[SweepRow]) -> list[Table | str]:
    """One row per point; reasons of those without a plan stand below, each once."""
    priced = any(row.cost_per_million_tokens is not None for row in rows)
    cost = ("cost of a million tokens",) if priced else ()
    numbers = ("devices", "step time", "samples/s", "tokens/s per device", *cost, "efficiency", "gap")
    keys = _short_keys(list(rows[0].values) if rows else [])
    result = table(f"Sweep of {name}", *keys, *numbers, "plan", right=(*keys, *numbers))
    reasons: dict[str, int] = {}
    for row in rows:
        cells = [str(value) for value in row.values.values()]
        devices = "-" if row.devices is None else f"{row.devices:,}"
        if row.step_time_s is None:
            note = reasons.setdefault(row.reason, len(reasons) + 1)
            result.add_row(*cells, devices, *["-"] * (len(numbers) - 1), f"none ({note})")
            continue
        used = "" if row.used_devices == row.devices else f" ({row.used_devices:,} used)"
        result.add_row(
            *cells,
            f"{devices}{used}",
            format_seconds(row.step_time_s),
            f"{row.samples_per_s:.4g}",
            f"{row.tokens_per_s_per_device:,.0f}",
            *([cost_text(row.cost_per_million_tokens) or "-"] if priced else []),
            f"{row.efficiency:.1%}",
            f"{row.gap:.2%}" + ("" if row.status == "optimal" else f" ({row.status})"),
            row.degrees,
        )
    return [result, *(f"({note}) {escape(reason)}" for reason, note in reasons.items())]


def _short_keys(keys: Sequence[str]) -> list[str]:
    """The last word of each key, the whole key where that is not enough to tell them apart."""
    last = [key.rpartition(".")[2] for key in keys]
    return [short if last.count(short) == 1 else key for short, key in zip(last, keys, strict=True)]


def save_sweep_csv(rows: Sequence[SweepRow], path: Path) -> None:
    """Keys as they were varied, then base units; an empty cell where there is no number."""
    text = io.StringIO()
    keys = list(rows[0].values) if rows else []
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*keys, *COLUMNS])
    for row in rows:
        numbers = [getattr(row, column) for column in COLUMNS]
        writer.writerow([*row.values.values(), *("" if number is None else number for number in numbers)])
    write_file(path, text.getvalue())


def sweep_document(
    name: str, rows: Sequence[SweepRow], advice: Sequence[str], points: int, objective: ObjectiveName = "step-time"
) -> dict[str, Any]:
    """`complete`: every point was reached."""
    return {
        "schema": "mmplan.sweep/1",
        "scenario": name,
        "complete": len(rows) == points,
        "objective": objective,
        "rows": values(list(rows)),
        "advice": list(advice),
    }


def plot_sweep(rows: Sequence[SweepRow], path: Path, objective: ObjectiveName = "step-time") -> None:
    """Write a PNG: what the objective reads over devices; of samples per second with the line of perfect scaling from
    each curve's first point."""
    reading = READINGS[objective]
    scales = reading.column == "samples_per_s"
    figure = new_figure(8, 5)
    axes = figure.subplots()
    for name, curve in curves(rows, objective).items():
        devices = [row.devices or 0 for row in curve]
        found = [reading.of(row) for row in curve]
        (line,) = axes.plot(devices, found, marker="o", label=name or "planned")
        if scales:
            perfect = [found[0] * count / devices[0] for count in devices]
            axes.plot(devices, perfect, linestyle=":", linewidth=1, color=line.get_color())
    axes.set_xscale("log", base=2)
    if scales:
        axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("devices (dotted: perfect scaling)" if scales else "devices")
    axes.set_ylabel(reading.says)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=8)
    save_png(figure, path)
