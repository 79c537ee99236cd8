"""HTML pages that need no network: style and pictures are inside the one file."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.table import Table
from rich.text import Text

from mmplan import __version__
from mmplan.files import write_file
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction
from mmplan.report.charts import plot_comparison
from mmplan.report.gantt import plot_gantt
from mmplan.report.summary import PlanSummary
from mmplan.report.tables import stage_table, summary_table

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --accent: #2563a8; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { margin-top: 2.2rem; border-bottom: 2px solid var(--accent); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--line); text-align: left; }
th { background: var(--soft); } .right { text-align: right; }
td.pass { color: #1a7f37; font-weight: 600; } td.fail { color: #c62828; font-weight: 600; }
img { max-width: 100%; background: white; border: 1px solid var(--line); border-radius: 4px; }
footer { margin-top: 3rem; color: #777; font-size: .85rem; }
"""


def compare_page(
    plans: Mapping[str, Plan],
    predictions: Mapping[str, Prediction],
    summaries: Sequence[PlanSummary],
    path: Path,
    more: Sequence[Table] = (),
) -> None:
    """Write the page of `mmplan compare`: numbers side by side, `more` tables, where the time goes, one chart each."""
    with TemporaryDirectory() as folder:
        overview = Path(folder) / "overview.png"
        plot_comparison(summaries, predictions, overview)
        parts = [html_table(summary_table(summaries)), *map(html_table, more)]
        parts.append(picture(overview, "where the time of a step goes"))
        for index, (name, plan) in enumerate(plans.items()):
            chart = Path(folder) / f"{index}.png"
            plot_gantt(plan, predictions[name], chart, title=name)
            parts += [heading(name), html_table(stage_table(plan)), picture(chart, f"one step of {name}")]
    scenarios = dict.fromkeys(plan.scenario.name for plan in plans.values())
    write_page(path, f"Plans for {', '.join(scenarios)}", parts)


def write_page(path: Path, title: str, parts: Sequence[str]) -> None:
    """One file of HTML parts under a title."""
    document = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1>\n{chr(10).join(parts)}\n"
        f"<footer>mmplan {__version__}</footer></body></html>\n"
    )
    write_file(path, document)


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def picture(png: Path, alt: str) -> str:
    """The file as an inline image."""
    data = base64.b64encode(png.read_bytes()).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'


def html_table(source: Table) -> str:
    """A terminal table as HTML; cells that read `ok` or `missed` are coloured."""
    columns = source.columns
    aligned = [' class="right"' if column.justify == "right" else "" for column in columns]
    heads = "".join(f"<th{a}>{escape(_plain(c.header))}</th>" for c, a in zip(columns, aligned, strict=True))
    rows = []
    for cells in zip(*(column.cells for column in columns), strict=True):
        texts = [_plain(cell) for cell in cells]
        rows.append("".join(_cell(text, a) for text, a in zip(texts, aligned, strict=True)))
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    caption = f"<caption>{escape(_plain(source.title))}</caption>" if source.title else ""
    return f'<div class="scroll"><table>{caption}<tr>{heads}</tr>\n{body}</table></div>'


def _cell(text: str, alignment: str) -> str:
    verdict = {"ok": ' class="pass"', "missed": ' class="fail"'}.get(text, alignment)
    return f"<td{verdict}>{escape(text)}</td>"


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain
