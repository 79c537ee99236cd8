"""Rows of a sweep, and how far adding devices pays.

Points that differ only in keys of `cluster` are one curve. Efficiency is samples per second and device of the cluster,
idle devices included, over that of the curve's first row with a plan.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mmplan.planner.sweep import SolvedPoint
from mmplan.report.alternatives import degrees_text
from mmplan.report.simulation import simulate_plan
from mmplan.report.summary import summarise
from mmplan.report.utilisation import plan_utilisation
from mmplan.units import format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """One point. Without a plan there are no numbers, and `reason` says why.

    `devices`: of the cluster; `used_devices`: of the plan. `step_time_s` is simulated; `gap` is the closed form's.
    `stage_bytes`: sent between stages in a step; `flops`: executed in it, with padding and what is recomputed.
    Costs: of the ranks that work; None where the cluster has no prices.
    """

    values: dict[str, Any]
    devices: int | None
    used_devices: int | None = None
    step_time_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    efficiency: float | None = None
    gap: float | None = None
    stage_bytes: int | None = None
    flops: float | None = None
    cost_per_step: float | None = None
    cost_per_million_tokens: float | None = None
    status: str = ""
    degrees: str = ""
    reason: str = ""


def sweep_row(point: SolvedPoint) -> SweepRow:
    """The numbers of a point, without its efficiency, which needs the others."""
    if point.plan is None:
        return SweepRow(values=point.values, devices=point.devices, reason=point.reason)
    prediction = simulate_plan(point.plan)
    summary, used = summarise("", point.plan, prediction), plan_utilisation(point.plan, prediction)
    return SweepRow(
        values=point.values,
        devices=point.devices,
        used_devices=summary.devices,
        step_time_s=summary.step_time_s,
        samples_per_s=summary.samples_per_s,
        tokens_per_s_per_device=summary.tokens_per_s_per_device,
        gap=summary.gap,
        stage_bytes=summary.stage_bytes,
        flops=None if used is None else sum(entry.hardware_flops for entry in used.modalities),
        cost_per_step=summary.cost_per_step,
        cost_per_million_tokens=summary.cost_per_million_tokens,
        status=summary.status,
        degrees=degrees_text(point.plan),
    )


def with_efficiency(rows: Sequence[SweepRow]) -> tuple[SweepRow, ...]:
    """The rows in their order, each against the first of its curve."""
    first: dict[str, float] = {}
    found = []
    for row in rows:
        if row.samples_per_s is not None and row.devices:
            each = row.samples_per_s / row.devices
            row = replace(row, efficiency=each / first.setdefault(curve_name(row), each))
        found.append(row)
    return tuple(found)


def curve_name(row: SweepRow) -> str:
    """What a row has in common with those of its curve: `batch.global=256`; empty where only the cluster varies."""
    return ", ".join(f"{key}={value}" for key, value in row.values.items() if not key.startswith("cluster."))


def curves(rows: Iterable[SweepRow]) -> dict[str, list[SweepRow]]:
    """Rows with a plan by curve, fewest devices first; of equal clusters the fastest."""
    found: dict[str, dict[int, SweepRow]] = {}
    for row in rows:
        if row.samples_per_s is None or row.devices is None:
            continue
        best = found.setdefault(curve_name(row), {})
        if row.devices not in best or row.samples_per_s > (best[row.devices].samples_per_s or 0.0):
            best[row.devices] = row
    return {name: [best[devices] for devices in sorted(best)] for name, best in found.items()}


def scaling_advice(rows: Iterable[SweepRow], worth: float) -> tuple[str, ...]:
    """One sentence per curve of two clusters or more: up to how many devices each doubling pays.

    Args:
        worth: times the samples per second that a doubling of devices has to bring. Steps between other multiples
            count as that power of theirs.
    """
    return tuple(_advice(name, curve, worth) for name, curve in curves(rows).items() if len(curve) > 1)


def _advice(name: str, curve: Sequence[SweepRow], worth: float) -> str:
    start = f"{name}: " if name else ""
    for before, after, gain in _gains(curve):
        if gain < worth:
            step = format_seconds(before.step_time_s or 0.0)
            return (
                f"{start}stop at {before.devices:,} devices ({step} per step): from there to {after.devices:,} a "
                f"doubling brings {gain:.2f} times the samples per second, less than {worth:g}"
            )
    least = min(gain for _, _, gain in _gains(curve))
    return (
        f"{start}adding devices pays up to {curve[-1].devices:,}, the most that was tried: every doubling brings at "
        f"least {least:.2f} times the samples per second"
    )


def _gains(curve: Sequence[SweepRow]) -> Iterator[tuple[SweepRow, SweepRow, float]]:
    """Neighbours and the speed-up per doubling between them."""
    for before, after in pairwise(curve):
        assert before.devices and after.devices and before.samples_per_s and after.samples_per_s
        doublings = math.log2(after.devices / before.devices)
        yield before, after, (after.samples_per_s / before.samples_per_s) ** (1 / doublings)
