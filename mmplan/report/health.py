"""What the doctor found, for the terminal, as a document and as a page with a curve for each monitor."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mmplan.report.health_charts import plot_readings
from mmplan.report.page import heading, html_table, paragraph, picture, write_page
from mmplan.report.tables import table
from mmplan.runtime.health.alignment import AlignmentResult, Difference
from mmplan.runtime.health.diagnosis import Finding
from mmplan.runtime.health.readings import Reading
from mmplan.runtime.health.rule import Rule
from mmplan.scenario.document import counted

_CERTAIN, _LIKELY = 1.0, 0.7


def doctor_document(
    target: Path,
    readings: Sequence[Reading],
    findings: Sequence[Finding],
    silent: Mapping[str, str],
    alignment: AlignmentResult | None,
    difference: Difference | None,
) -> dict[str, Any]:
    """Findings in their order; `monitors`: how many readings each took; `silent`: which could take none, and why."""
    counts: dict[str, int] = {}
    for reading in readings:
        counts[reading.monitor] = counts.get(reading.monitor, 0) + 1
    return {
        "schema": "mmplan.doctor/1",
        "target": str(target),
        "healthy": not findings,
        "findings": [_values(finding) for finding in findings],
        "monitors": counts,
        "silent": dict(silent),
        "alignment": None if alignment is None else alignment.values(),
        "difference": None if difference is None else difference.values(),
    }


def findings_text(
    target: Path, readings: Sequence[Reading], findings: Sequence[Finding], silent: Mapping[str, str]
) -> RenderableType:
    """One paragraph a finding, the cause first; then what could not be watched."""
    monitors = sorted({reading.monitor for reading in readings})
    watched = f"{counted(len(readings), 'reading')} of {counted(len(monitors), 'monitor')}"
    if not findings:
        return Group(Text(f"{target}: nothing found in {watched} ({', '.join(monitors)})"), *_not_read(silent))
    lines: list[RenderableType] = [Text(f"{target}: {counted(len(findings), 'finding')} in {watched}", style="bold")]
    for number, one in enumerate(findings, start=1):
        text = Text(f"\n{number}. ")
        text.append(f"{one.monitor} at {one.of}", style="bold red" if not one.follows else "bold")
        text.append(f" ({certainty(one)})")
        more = Text(f"{one.evidence}\ndo: {one.advice}\nlimit: {one.source}")
        lines += [text, Padding(more, (0, 0, 0, 3))]
    return Group(*lines, *_not_read(silent))


def _not_read(silent: Mapping[str, str]) -> list[RenderableType]:
    return [Text(f"not read: {name}: {why}", style="dim") for name, why in silent.items()]


def certainty(finding: Finding) -> str:
    """As a word."""
    if finding.follows:
        return f"follows from {finding.follows}"
    if finding.certainty >= _CERTAIN:
        return "a fact"
    return "likely" if finding.certainty >= _LIKELY else "possible"


def alignment_table(result: AlignmentResult, difference: Difference | None) -> Table:
    """Values with their interval of 95 %."""
    title = f"alignment on {result.images:,} images and {result.captions:,} captions"
    columns = ["quantity", "value", "95 % from", "to"]
    if difference is not None:
        columns += ["against", "difference", "from", "to"]
    drawn = table(title, *columns, right=tuple(columns[1:]))
    for name, value in result.quantities.items():
        row = [name, f"{value.value:.4f}", f"{value.least:.4f}", f"{value.most:.4f}"]
        if difference is not None:
            change = difference.changes[name]
            told = (difference.other.quantities[name].value, change.value, change.least, change.most)
            row += [f"{number:+.4f}" if place else f"{number:.4f}" for place, number in enumerate(told)]
        drawn.add_row(*row)
    return drawn


def health_page(
    path: Path,
    target: Path,
    readings: Sequence[Reading],
    findings: Sequence[Finding],
    rules: Mapping[str, Rule],
    silent: Mapping[str, str],
    tables: Sequence[Table] = (),
) -> None:
    """Write the page: findings with evidence and advice, then what was not read, each monitor over the
    steps with its limit."""
    parts = [paragraph("nothing found") if not findings else html_table(_findings_table(findings))]
    parts += [paragraph(f"not read: {name}: {why}") for name, why in silent.items()]
    parts += map(html_table, tables)
    with TemporaryDirectory() as folder:
        for monitor in sorted({reading.monitor for reading in readings if reading.monitor in rules}):
            chart = Path(folder) / f"{monitor}.png"
            own = [reading for reading in readings if reading.monitor == monitor]
            plot_readings(own, rules[monitor], chart)
            rule = rules[monitor]
            parts += [heading(monitor), paragraph(f"{rule.metric}. Limit {rule.limit:g}: {rule.source}.")]
            parts.append(picture(chart, f"{monitor} over the steps"))
    write_page(path, f"Health of {target.name}", parts)


def _findings_table(findings: Sequence[Finding]) -> Table:
    drawn = table("findings, the cause first", "monitor", "of", "how certain", "evidence", "what to do")
    for one in findings:
        drawn.add_row(one.monitor, Text(one.of), certainty(one), Text(one.evidence), Text(one.advice))
    return drawn


def _values(finding: Finding) -> dict[str, Any]:
    return {field.name: getattr(finding, field.name) for field in fields(finding)}
