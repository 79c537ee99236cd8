"""The migration matrix as tables and as a document."""

from collections.abc import Mapping
from dataclasses import asdict

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mmplan.planner.formats.matrix import Column, Matrix, Verdict
from mmplan.units import format_seconds

_SHOWN = {"native": "yes", "plug-in": "plug", "impossible": "no"}
_STYLE = {"native": "green", "plug-in": "yellow", "impossible": "red"}


def matrix_parts(matrix: Matrix) -> list[RenderableType]:
    """Needs against frameworks, then what decides about each framework and what its exporter does."""
    return [_needs(matrix), _verdicts(matrix)]


def _needs(matrix: Matrix) -> Table:
    table = Table(
        title="needs of the plan: a framework has it (yes), takes a plug-in for it, cannot (no)", title_justify="left"
    )
    table.add_column("need", ratio=1)
    for column in matrix.columns:
        table.add_column(column.target.short, justify="center", no_wrap=True)
    for place, need in enumerate(matrix.needs):
        cells = [column.cells[place] for column in matrix.columns]
        shown = [Text("") if one is None else Text(_SHOWN[one.status], style=_STYLE[one.status]) for one in cells]
        table.add_row(Text(f"{need.name}: {need.sentence}"), *shown)
    table.add_section()
    table.add_row("ready", *(f"{column.readiness:.0%}" for column in matrix.columns))
    return table


def _verdicts(matrix: Matrix) -> Table:
    table = Table(title="what decides", title_justify="left")
    for name in ("framework", "ready", "the line that decides", "mmplan export"):
        table.add_column(name)
    for column in sorted(matrix.columns, key=lambda one: -one.readiness):
        decides = f"{column.decides} [{column.source}]" if column.decides else "runs the plan as it is"
        name = f"{column.target.name} {column.target.version}"
        told = _told(column.target.export, column.verdict)
        table.add_row(Text(name), f"{column.readiness:.0%}", Text(decides), Text(told))
    return table


def _told(exporter: str, verdict: Verdict | None) -> str:
    """One line on what `mmplan export` gives."""
    if verdict is None:
        return "no exporter"
    if verdict.refused:
        return f"--to {exporter}: refused"
    if not verdict.losses:
        return f"--to {exporter}: as it is"
    more_s = verdict.step_more_s
    price = "price unknown" if more_s is None else f"{'+' if more_s >= 0 else '-'}{format_seconds(abs(more_s))} a step"
    return f"--to {exporter}: {len(verdict.losses)} changed, {price}"


def matrix_document(matrix: Matrix) -> Mapping[str, object]:
    """`mmplan.matrix/1`."""
    return {
        "schema": "mmplan.matrix/1",
        "needs": [asdict(need) for need in matrix.needs],
        "targets": [_values(column) for column in matrix.columns],
    }


def _values(column: Column) -> dict[str, object]:
    verdict = column.verdict
    losses = [] if verdict is None else [{"sentence": one.sentence, "step_s": one.step_s} for one in verdict.losses]
    return {
        "target": column.target.name,
        "version": column.target.version,
        "runs": column.target.runs,
        "readiness": column.readiness,
        "decides": column.decides,
        "source": column.source,
        "cells": [None if one is None else asdict(one) for one in column.cells],
        "export": column.target.export if verdict is not None else None,
        "refused": verdict.refused if verdict is not None else None,
        "losses": losses,
    }
