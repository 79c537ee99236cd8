"""What is in a folder of checkpoints, without a run. Imports no torch."""

from dataclasses import dataclass, replace
from pathlib import Path

from mmplan.errors import InputError
from mmplan.planner.plan import Plan, load_plan
from mmplan.runtime.checkpoint.folder import Damaged, committed, passed_over, read_manifest, renamed, require_whole
from mmplan.runtime.checkpoint.manifest import PLAN, Manifest

PASSED_OVER = "passed over: "  # of a renamed checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A checkpoint; `manifest` and `plan` are None where they cannot be read, `damage` is None where it is whole."""

    path: Path
    manifest: Manifest | None
    plan: Plan | None
    damage: str | None


def list_checkpoints(folder: Path) -> tuple[Listed, ...]:
    """All checkpoints, the newest first, then renamed ones; every byte is read.

    Raises:
        InputError: there are none.
    """
    others = [replace(_listed(path), damage=f"{PASSED_OVER}{passed_over(path)}") for path in renamed(folder)]
    found = (*(_listed(path) for path in committed(folder)), *others)
    if not found:
        raise InputError("there are no checkpoints", file=folder)
    return found


def _listed(path: Path) -> Listed:
    manifest = plan = damage = None
    try:
        manifest = read_manifest(path)
        require_whole(path, manifest, manifest.files)
        plan = load_plan(path / PLAN)
    except (Damaged, InputError) as error:
        damage = str(error)
    return Listed(path=path, manifest=manifest, plan=plan, damage=damage)
