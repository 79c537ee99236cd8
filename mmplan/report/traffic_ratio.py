"""Bytes between stages against FLOPs over the batch: where a larger batch makes a plan that sends more per FLOP.

Both are linear in the samples, so a plan that stays the same keeps the ratio; it jumps where the best plan changes.
"""

from collections.abc import Iterable
from itertools import pairwise

from mmplan.report.sweep import SweepRow

BATCH = "batch.global"
# Half as much again is another plan, not another mixture of images and text.
JUMP = 1.5


def bytes_per_flop(row: SweepRow) -> float | None:
    """Bytes sent between stages over FLOPs executed; None without a plan."""
    return row.stage_bytes / row.flops if row.stage_bytes is not None and row.flops else None


def ratio_jumps(rows: Iterable[SweepRow]) -> tuple[str, ...]:
    """One sentence per pair of neighbouring batches between which the ratio grows more than `JUMP` times, or from 0."""
    lines: dict[str, list[SweepRow]] = {}
    for row in rows:
        if BATCH in row.values and bytes_per_flop(row) is not None:
            lines.setdefault(_rest(row), []).append(row)
    found = []
    for rest, line in lines.items():
        for before, after in pairwise(sorted(line, key=lambda row: row.values[BATCH])):
            old, new = bytes_per_flop(before) or 0.0, bytes_per_flop(after) or 0.0
            if new <= JUMP * old or new == 0.0:
                continue
            grows = f"grow {new / old:.2f} times" if old else "begin"
            where = f"{rest}: " if rest else ""
            batches = f"{before.values[BATCH]} to {after.values[BATCH]}"
            found.append(
                f"{where}from {BATCH} {batches} the bytes between stages per FLOP {grows}: {before.degrees} becomes "
                f"{after.degrees}"
            )
    return tuple(found)


def _rest(row: SweepRow) -> str:
    return ", ".join(f"{key}={value}" for key, value in row.values.items() if key != BATCH)
