"""What `mmplan backtest` prints, writes and draws."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from mmplan.errors import InputError
from mmplan.planner.backtest import Backtest, PricedRow, Scores, scores
from mmplan.planner.interval import estimate_interval
from mmplan.planner.leave_one_out import LeftOut
from mmplan.planner.memory_backtest import MemoryBacktest
from mmplan.report.documents import values
from mmplan.report.tables import table
from mmplan.units import format_seconds

_NUMBERS = ("rows", "median", "p90", "worst", "bias", "tau", "regret")


def backtest_document(result: Backtest, memory: MemoryBacktest, left_out: LeftOut | None) -> dict[str, Any]:
    """Scores as fractions (0.05 = 5 %); `unpriced` lists every row that has no prediction, with the reason."""
    document: dict[str, Any] = {
        "schema": "mmplan.backtest/1",
        "overall": values(scores(result.priced)),
        "sources": {name: values(scores(rows)) for name, rows in result.sources().items()},
        "splits": {name: values(scores(rows)) for name, rows in _splits(result.priced).items()},
        "priced": [
            {
                "id": row.job.row.id,
                "source": row.job.row.source,
                "measured_s": row.job.step_s,
                "predicted_s": row.estimate.step_s,
                "error": row.error,
                "assumed": list(row.job.assumed),
            }
            for row in result.priced
        ],
        "unpriced": [
            {"id": lost.row.id, "source": lost.row.source, "line": lost.row.line, "reason": lost.reason}
            for lost in result.unpriced
        ],
        "memory": memory.document(),
    }
    if left_out is not None:
        document["leave_one_out"] = {
            "overall": values(scores(left_out.rows)),
            "groups": {name: values(scores(rows)) for name, rows in left_out.lineages().items()},
        }
    return document


def backtest_tables(result: Backtest, memory: MemoryBacktest, left_out: LeftOut | None) -> tuple[Table | str, ...]:
    """One row per source, then the splits and all; the rows without a prediction by reason; memory."""
    title = "Step times, predicted against measured (errors of the prediction)"
    times = _scores_table(title, "source", result.sources())
    times.add_section()
    for name, rows in (*_splits(result.priced).items(), ("all", result.priced)):
        _add(times, name, scores(rows))
    parts: list[Table | str] = [times]
    if left_out is not None:
        left = _scores_table("Each group predicted by a fit to the others", "group left out", left_out.lineages())
        left.add_section()
        _add(left, "all", scores(left_out.rows))
        parts.append(left)
    if result.unpriced:
        reasons: dict[tuple[str, str], int] = {}
        for row in result.unpriced:
            key = (row.row.source, row.reason)
            reasons[key] = reasons.get(key, 0) + 1
        missing = table(f"Not priced: {len(result.unpriced)} rows", "source", "reason", "rows", right=("rows",))
        for (source, reason), count in reasons.items():
            missing.add_row(source, reason, str(count))
        parts.append(missing)
    parts.append(_memory_table(memory))
    return tuple(parts)


def explain_table(result: Backtest, row_id: str) -> Table:
    """Where the predicted time of one row goes.

    Raises:
        InputError: there is no priced row of that id.
    """
    found = [row for row in result.priced if row.job.row.id == row_id]
    if not found:
        reasons = [row.reason for row in result.unpriced if row.row.id == row_id]
        raise InputError(f"row '{row_id}' is not priced: {reasons[0]}" if reasons else f"no row has the id '{row_id}'")
    row = found[0]
    degrees, technique = row.job.degrees, row.job.scenario.technique
    title = (
        f"{row_id}, {row.job.row.source}: predicted {format_seconds(row.estimate.step_s)}, "
        f"measured {format_seconds(row.job.step_s)} ({row.error:+.1%})"
    )
    result_table = table(title, "part", "seconds", "share", right=("seconds", "share"))
    for name, part_s in row.estimate.named().items():
        if part_s > 0:
            result_table.add_row(name, format_seconds(part_s), f"{part_s / row.estimate.step_s:.1%}")
    interval = estimate_interval(row.job.scenario, degrees)
    number = interval.influences[0].number
    seconds = f"{format_seconds(interval.p10_s)} to {format_seconds(interval.p90_s)}"
    result_table.add_section()
    result_table.add_row("P10 to P90", seconds, f"most by {number.parameter} of {number.of}")
    for label, item in (("configuration", degrees), ("software", technique)):
        said = ", ".join(f"{name} {value}" for name, value in values(item).items() if value not in (1, None, False))
        result_table.add_row(label, said, "")
    result_table.add_row("assumed", "; ".join(row.job.assumed) or "nothing", "")
    return result_table


def plot_backtest(result: Backtest, path: Path) -> None:
    """Write a PNG: predicted against measured step time, one colour per source, lines at +-10 %."""
    figure = Figure(figsize=(8, 7), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, rows in result.sources().items():
        measured = [row.job.step_s for row in rows]
        axes.scatter(measured, [row.estimate.step_s for row in rows], s=9, alpha=0.7, label=name)
    if result.priced:
        ends = [f(row.job.step_s for row in result.priced) for f in (min, max)]
        for factor, style in ((1.0, "-"), (0.9, ":"), (1.1, ":")):
            axes.plot(ends, [factor * end for end in ends], style, color="#444444", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured step (s)")
    axes.set_ylabel("predicted step (s)")
    if result.priced:
        axes.legend(fontsize=6, loc="upper left")
    figure.savefig(path, format="png")


def _splits(rows: Sequence[PricedRow]) -> dict[str, tuple[PricedRow, ...]]:
    named = {"fitted": "fit", "held out": "held-out"}
    split = {name: tuple(row for row in rows if row.job.row.split == key) for name, key in named.items()}
    return {name: chosen for name, chosen in split.items() if chosen}


def _scores_table(title: str, first: str, groups: dict[str, tuple[PricedRow, ...]]) -> Table:
    result = table(title, first, *_NUMBERS, right=_NUMBERS)
    for name, rows in groups.items():
        _add(result, name, scores(rows))
    return result


def _add(target: Table, name: str, score: Scores | None) -> None:
    if score is None:
        return
    tau = "" if score.tau is None else f"{score.tau:.2f}"
    regret = "" if score.regret is None else f"{score.regret:.1%}"
    errors = (f"{score.median_ape:.1%}", f"{score.p90_ape:.1%}", f"{score.worst:+.1%}", f"{score.bias:+.1%}")
    target.add_row(name, str(score.n), *errors, tau, regret)


def _memory_table(memory: MemoryBacktest) -> Table | str:
    document: dict[str, Any] = memory.document()
    if document["overall"] is None:
        return "Memory: no row gives allocated memory that can be predicted."
    numbers = ("rows", "median", "p90", "worst", "bias")
    result = table("Peak memory, allocated", "source", *numbers, right=numbers)
    for name, score in (*document["sources"].items(), ("all", document["overall"])):
        if score is not None:
            errors = (f"{score[key]:.1%}" for key in ("median_ape", "p90_ape", "worst"))
            result.add_row(name, str(score["n"]), *errors, f"{score['bias']:+.1%}")
    return result
