"""Gradients of a plan beside those of one process."""

from typing import Any

from rich.markup import escape
from rich.table import Table

from mmplan.report.tables import table
from mmplan.runtime.gradient_differences import TOLERANCE, Comparison
from mmplan.scenario.document import counted

_SHOWN = 5  # parameters


def gradients_text(found: Comparison | None) -> list[Table | str]:
    """A line where all agree, else the parameters that differ most."""
    if found is None:
        return []
    of = f"of {counted(len(found.differences), 'trained parameter')} on {counted(found.processes, 'rank')}"
    loss = f"loss {found.loss:.6g}, in one process {found.loss_in_one:.6g} ({found.loss_difference:.1e})"
    worst = f"worst {escape(found.differences[0].parameter)} ({found.differences[0].relative:.1e})"
    if found.passed:
        return [f"[green]gradients {of} are those of one process[/green] to {TOLERANCE:g}: {worst}; {loss}"]
    lines: list[Table | str] = [f"[red]gradients {of} are not those of one process[/red] to {TOLERANCE:g}: {loss}"]
    if found.missing:
        lines.append(f"{counted(len(found.missing), 'parameter')} not whole on the ranks, the first {found.missing[0]}")
    if found.wrong:
        rows = table(f"{len(found.wrong)} gradients that differ, the {_SHOWN} most", "parameter", "relative difference")
        for one in found.wrong[:_SHOWN]:
            rows.add_row(escape(one.parameter), f"{one.relative:.1e}")
        lines.append(rows)
    return lines


def gradients_document(found: Comparison) -> dict[str, Any]:
    return {
        "passed": found.passed,
        "tolerance": TOLERANCE,
        "processes": found.processes,
        "loss": found.loss,
        "loss_in_one_process": found.loss_in_one,
        "parameters": [{"name": one.parameter, "relative": one.relative} for one in found.differences],
        "missing": list(found.missing),
    }
