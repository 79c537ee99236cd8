"""The table and document of a folder of checkpoints."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from mmplan.report.alternatives import degrees_text
from mmplan.report.tables import table
from mmplan.runtime.checkpoint.listing import PASSED_OVER, Listed
from mmplan.units import format_bytes


def checkpoints_table(found: Sequence[Listed]) -> Table:
    """One row per checkpoint, the newest first."""
    title = f"Checkpoints of {next((one.plan.scenario.name for one in found if one.plan), 'an unknown run')}"
    result = table(title, "step", "saved at", "size", "ranks", "plan", "state", right=("step", "size", "ranks"))
    for one in found:
        manifest = one.manifest
        result.add_row(
            one.path.name.removeprefix("step-").lstrip("0") if manifest is None else f"{manifest.step:,}",
            "?" if manifest is None else manifest.saved_at,
            "?" if manifest is None else format_bytes(manifest.total_bytes),
            "?" if manifest is None else str(manifest.ranks),
            "?" if one.plan is None else degrees_text(one.plan),
            "whole" if one.damage is None else _what(one.damage),
        )
    return result


def _what(damage: str) -> str:
    return damage if damage.startswith(PASSED_OVER) else f"damaged: {damage}"


def checkpoints_document(found: Sequence[Listed]) -> dict[str, Any]:
    return {"schema": "mmplan.checkpoints/1", "checkpoints": [_row(one) for one in found]}


def _row(one: Listed) -> dict[str, Any]:
    manifest = one.manifest
    return {
        "path": str(one.path),
        "step": manifest and manifest.step,
        "saved_at": manifest and manifest.saved_at,
        "bytes": manifest and manifest.total_bytes,
        "ranks": manifest and manifest.ranks,
        "plan_hash": manifest and manifest.plan_hash,
        "damage": one.damage,
    }
