"""How busy every rank is over a step, as one line of blocks in the terminal."""

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from mmplan.planner.prediction import Prediction, TimedAction
from mmplan.report.tables import table

_BLOCKS = " ▁▂▃▄▅▆▇█"
_MOST_ROWS = 32


def busy_table(prediction: Prediction, width: int = 60) -> Table:
    """One row per rank: the part of each of `width` slices of the step in which it computes. A blank is a bubble."""
    by_rank: dict[int, list[TimedAction]] = {rank.rank: [] for rank in prediction.ranks}
    for item in prediction.timeline:
        if item.action.kind in "FBIW":
            by_rank[item.rank].append(item)
    shown = prediction.ranks[:_MOST_ROWS]
    more = f"; {len(prediction.ranks) - len(shown)} more ranks" if len(prediction.ranks) > len(shown) else ""
    result = table(f"Busy over the step (blank: bubble){more}", "rank", "busy", "bubble", right=("bubble",))
    for rank in shown:
        line = sparkline(busy_parts(by_rank[rank.rank], prediction.step_time_s, width))
        result.add_row(str(rank.rank), line, f"{rank.bubble:.1%}")
    return result


def busy_parts(computes: Sequence[TimedAction], step_s: float, width: int) -> list[float]:
    """Fraction of each slice of the step that the computes take."""
    if step_s <= 0:
        return [0.0] * width
    starts = np.array([item.start_s for item in computes])
    ends = np.array([item.end_s for item in computes])
    edges = np.linspace(0.0, step_s, width + 1)
    # Seconds computed before each edge: whole actions before it, and parts of those that span it.
    before = np.array([np.clip(np.minimum(ends, edge) - starts, 0.0, None).sum() for edge in edges])
    parts = np.diff(before) / (step_s / width)
    return [float(part) for part in parts]


def sparkline(parts: Sequence[float]) -> str:
    """Fractions from 0 to 1 as blocks; only what is empty is blank."""
    last = len(_BLOCKS) - 1
    return "".join(_BLOCKS[min(last, max(0, int(np.ceil(round(part * last, 6)))))] for part in parts)
