"""Predicted against measured memory: rows of a measured table that give memory, and why others are no target.

Sources that report live tensors (`allocated`) are compared with the estimate's allocated bytes on the fullest stage.
nvidia-smi readings also hold the allocator's cache, which depends on the order of allocations: they are listed with
the device's number, apart, and are not a target.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mmplan.errors import MmplanError
from mmplan.planner.measured import MeasuredRow
from mmplan.planner.memory import estimate_memory
from mmplan.planner.row_job import RowJob, row_job

GIB = 2.0**30
Kind = Literal["allocated", "nvidia-smi"]
# The attention of these rows is not stated but must be fused: score matrices alone would take 4 layers x 8 microbatches
# x 5 B x 24 heads x 4,096^2 = 60 GiB where 22 GiB were measured.
FUSED_ATTENTION_SOURCE = "Vocabulary Parallelism"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """One row: gigabytes are GiB (the zero-bubble tables agree with 2^30 within 1 %, with 10^9 within 8 %)."""

    id: str
    source: str
    kind: Kind
    stage: int
    predicted_gib: float
    measured_gib: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_gib / self.measured_gib - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySummary:
    """Errors of the rows of one kind or source."""

    n: int
    median_ape: float
    p90_ape: float
    bias: float
    worst: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBacktest:
    """All rows with memory; `skipped`: (row id, reason)."""

    rows: tuple[MemoryRow, ...]
    skipped: tuple[tuple[str, str], ...]

    def of(self, kind: Kind, source: str | None = None) -> tuple[MemoryRow, ...]:
        return tuple(row for row in self.rows if row.kind == kind and source in (None, row.source))

    def document(self) -> dict[str, object]:
        """The `memory` part of the backtest's JSON: the target overall and per source, nvidia-smi apart."""
        sources = sorted({row.source for row in self.rows})
        return {
            "overall": _values(summarise(self.of("allocated"))),
            "sources": {name: _values(summarise(self.of("allocated", name))) for name in sources},
            "nvidia_smi": _values(summarise(self.of("nvidia-smi"))),
            "skipped": [{"id": row, "reason": reason} for row, reason in self.skipped],
        }


def memory_backtest(rows: Sequence[MeasuredRow]) -> MemoryBacktest:
    """Estimates of all rows that give memory."""
    found: list[MemoryRow] = []
    skipped: list[tuple[str, str]] = []
    for row in rows:
        measured = _measured_gib(row)
        if measured is None:
            continue
        result = memory_of_row(row, measured)
        if isinstance(result, str):
            skipped.append((row.id, result))
        else:
            found.append(result)
    return MemoryBacktest(rows=tuple(found), skipped=tuple(skipped))


def memory_of_row(row: MeasuredRow, measured_gib: float) -> MemoryRow | str:
    """The estimate of one row, or the reason why there is none."""
    schedule = row.text("schedule")
    if "vocab-" in schedule or "interlaced" in schedule:
        return f"'{schedule}' splits the vocabulary layers over the stages, which no degree here expresses"
    # memory needs no step time, so a row without one is a row all the same
    job = row_job(row if "step_s" in row.numbers else replace(row, numbers={**row.numbers, "step_s": 1.0}))
    if not isinstance(job, RowJob):
        return job.reason
    scenario = job.scenario
    if row.source.startswith(FUSED_ATTENTION_SOURCE) and not row.text("attention"):
        scenario = replace(scenario, technique=replace(scenario.technique, attention="flash2"))
    try:
        stages = estimate_memory(scenario, job.degrees)
    except MmplanError as error:
        return str(error)
    smi = "nvidia-smi" in row.text("memory_kind") or "node" in row.text("memory_kind")
    fullest = max(stages, key=lambda stage: stage.device_bytes if smi else stage.allocated_bytes)
    return MemoryRow(
        id=row.id,
        source=row.source,
        kind="nvidia-smi" if smi else "allocated",
        stage=fullest.stage,
        predicted_gib=(fullest.device_bytes if smi else fullest.allocated_bytes) / GIB,
        measured_gib=measured_gib,
    )


def _measured_gib(row: MeasuredRow) -> float | None:
    try:
        value = float(row.texts.get("memory_gib", ""))
    except ValueError:
        return None
    return value if value > 0 else None


def summarise(rows: Sequence[MemoryRow]) -> MemorySummary | None:
    """Median, 90th percentile and worst absolute error, and the median signed error; None without rows."""
    if not rows:
        return None
    signed = sorted(row.error for row in rows)
    absolute = sorted(abs(error) for error in signed)
    return MemorySummary(
        n=len(rows),
        median_ape=_median(absolute),
        p90_ape=absolute[min(len(rows) - 1, int(0.9 * len(rows)))],
        bias=_median(signed),
        worst=absolute[-1],
    )


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _values(summary: MemorySummary | None) -> dict[str, float] | None:
    if summary is None:
        return None
    return {
        "n": summary.n,
        "median_ape": summary.median_ape,
        "p90_ape": summary.p90_ape,
        "bias": summary.bias,
        "worst": summary.worst,
    }
