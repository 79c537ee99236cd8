"""Rows of a sweep, how far adding devices pays, and which row is best by an objective other than the step time.

Points that differ only in keys of `cluster` are one curve. Efficiency is samples per second and device of the cluster,
idle devices included, over that of the curve's first row with a plan.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mmplan.planner.objective import ObjectiveName
from mmplan.planner.sweep import SolvedPoint
from mmplan.report.alternatives import degrees_text
from mmplan.report.simulation import simulate_plan
from mmplan.report.summary import summarise
from mmplan.report.utilisation import plan_utilisation
from mmplan.scenario.document import counted
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What an objective reads off a row, more or less of which is better, with the words for it."""

    column: str
    says: str
    text: Callable[[float], str]
    more: bool = False

    def of(self, row: SweepRow) -> float:
        """NaN where there is none."""
        value = getattr(row, self.column)
        return math.nan if value is None else float(value)

    def better(self, row: SweepRow, than: SweepRow) -> bool:
        return self.of(row) > self.of(than) if self.more else self.of(row) < self.of(than)


_SPEED = Reading(column="samples_per_s", says="samples per second", text=lambda value: f"{value:.4g}", more=True)
READINGS: dict[ObjectiveName, Reading] = {
    "step-time": _SPEED,
    "p90-time": _SPEED,
    "device-time": Reading(
        column="tokens_per_s_per_device",
        says="tokens per second and device",
        text=lambda value: f"{value:,.0f}",
        more=True,
    ),
    "cost": Reading(
        column="cost_per_million_tokens", says="cost of a million tokens", text=lambda value: f"{value:,.4g}"
    ),
    "devices": Reading(column="used_devices", says="devices", text=lambda value: f"{value:,.0f}"),
}


def curves(rows: Iterable[SweepRow], objective: ObjectiveName = "step-time") -> dict[str, list[SweepRow]]:
    """Rows with a plan by curve, fewest devices first; of equal clusters the best by the objective."""
    reading = READINGS[objective]
    found: dict[str, dict[int, SweepRow]] = {}
    for row in rows:
        if row.samples_per_s is None or row.devices is None:
            continue
        best = found.setdefault(curve_name(row), {})
        if row.devices not in best or reading.better(row, best[row.devices]):
            best[row.devices] = row
    return {name: [best[devices] for devices in sorted(best)] for name, best in found.items()}


def advice_of(rows: Sequence[SweepRow], worth: float, objective: ObjectiveName) -> tuple[str, ...]:
    """By step time where to stop adding devices, else where the objective is best."""
    return scaling_advice(rows, worth) if READINGS[objective] is _SPEED else best_advice(rows, objective)


def best_advice(rows: Iterable[SweepRow], objective: ObjectiveName) -> tuple[str, ...]:
    """One sentence per curve of two clusters or more: which of them is best by the objective, and by how much."""
    reading = READINGS[objective]
    return tuple(_best(name, curve, reading) for name, curve in curves(rows, objective).items() if len(curve) > 1)


def _best(name: str, curve: Sequence[SweepRow], reading: Reading) -> str:
    best, worst = curve[0], curve[0]
    for row in curve[1:]:
        best = row if reading.better(row, best) else best
        worst = row if reading.better(worst, row) else worst
    start, words = f"{name}: " if name else "", ("most", "fewest") if reading.more else ("least", "most")
    high, low = (f"{counted(row.devices or 0, 'device')} ({reading.text(reading.of(row))})" for row in (best, worst))
    return f"{start}{words[0]} {reading.says} on a cluster of {high}, {words[1]} on one of {low}"


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
