"""Bytes on links over a step: activations, gradients between stages, and reductions."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from mmplan.planner.prediction import TimedAction
from mmplan.report.palette import REDUCE, TRANSFER
from mmplan.units import format_bytes_per_s

_GRADIENT = "#EE7733"


def draw_communication(axes: Axes, timeline: Sequence[TimedAction]) -> None:
    """Bytes per second in flight over all ranks, each transfer spread evenly over its time on the link."""
    sends = [item for item in timeline if item.action.kind == "SEND"]
    kinds = (
        ("activations", TRANSFER, [item for item in sends if "<" not in item.action.tensor]),
        ("gradients", _GRADIENT, [item for item in sends if "<" in item.action.tensor]),
        ("all-reduce", REDUCE, [item for item in timeline if item.action.kind in ("REDUCE", "TIE")]),
    )
    for label, fill, items in kinds:
        times_s, rates = rates_over_time(items)
        if len(times_s):
            axes.fill_between(times_s, rates, step="post", color=fill, alpha=0.6, linewidth=0, label=label)
    axes.set_ylim(bottom=0.0)
    axes.margins(y=0.35)
    axes.yaxis.set_major_formatter(lambda rate, _: format_bytes_per_s(rate) if rate else "0")
    axes.tick_params(axis="y", labelsize=8)
    axes.set_title("bytes on links, all ranks together", fontsize=9, loc="left", color="#555555")
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right", ncols=3, fontsize=7, frameon=False)


def rates_over_time(items: Sequence[TimedAction]) -> tuple[np.ndarray, np.ndarray]:
    """Times at which the rate changes, and the bytes per second from then on; transfers without length are left out."""
    moved = [item for item in items if item.end_s > item.start_s and item.action.bytes > 0]
    rates = np.array([item.action.bytes / (item.end_s - item.start_s) for item in moved])
    times_s = np.array([item.start_s for item in moved] + [item.end_s for item in moved])
    changes = np.concatenate([rates, -rates]) if moved else np.zeros(0)
    order = np.argsort(times_s, kind="stable")
    return times_s[order], np.maximum(np.cumsum(changes[order]), 0.0)
