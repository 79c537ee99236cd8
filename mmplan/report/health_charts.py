"""One picture a monitor: its values over the steps, its limit, and where it fired."""

import math
from collections.abc import Sequence
from pathlib import Path

from mmplan.report.pictures import new_figure, save_png
from mmplan.runtime.health.readings import Reading
from mmplan.runtime.health.rule import Rule

_FIRED, _LIMIT = "#c62828", "#777777"
_MOST_LINES = 8


def plot_readings(readings: Sequence[Reading], rule: Rule, path: Path) -> None:
    """Write a PNG; values that were no numbers stand as crosses at the upper edge."""
    figure = new_figure(9, 2.6)
    axes = figure.subplots()
    limit = readings[-1].limit
    for of in list(dict.fromkeys(reading.of for reading in readings))[:_MOST_LINES]:
        rows = [reading for reading in readings if reading.of == of]
        numbers = [math.nan if row.value is None else row.value for row in rows]
        axes.plot([row.step for row in rows], numbers, marker=".", linewidth=1, label=of)
        fired = [row for row in rows if row.fired and row.value is not None]
        axes.plot([row.step for row in fired], [row.value or 0.0 for row in fired], "x", color=_FIRED)
    missing = [row.step for row in readings if row.value is None]
    axes.plot(missing, [0.97] * len(missing), "x", color=_FIRED, transform=axes.get_xaxis_transform())
    axes.axhline(limit, color=_LIMIT, linestyle="--", linewidth=1)
    known = [row.value for row in readings if row.value is not None and row.value > 0]
    if known and max(*known, limit) > 100 * min(*known, limit if limit > 0 else math.inf):
        axes.set_yscale("symlog", linthresh=min(known))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(rule.unit)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    save_png(figure, path)
