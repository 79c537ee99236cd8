"""What there is to be seen of a run or a checkpoint: readings, and retrieval where there are images and captions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mmplan.errors import InputError
from mmplan.planner.plan import load_plan
from mmplan.runtime.health.alignment import AlignmentResult, Difference, compare_alignment
from mmplan.runtime.health.captions import read_captions
from mmplan.runtime.health.diagnosis import Finding
from mmplan.runtime.health.examine import checkpoint_alignment, probe_readings, weight_readings
from mmplan.runtime.health.readings import Reading, load_readings, load_silent
from mmplan.runtime.health.run_readings import run_readings
from mmplan.runtime.health.weights import SUFFIXES
from mmplan.runtime.measurement import load_run


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Examined:
    """`findings` are those that no reading tells: a checkpoint that retrieves worse than another. `silent`: monitors
    that could take no reading, and why."""

    readings: tuple[Reading, ...]
    silent: Mapping[str, str] = field(default_factory=dict)
    alignment: AlignmentResult | None = None
    difference: Difference | None = None
    findings: tuple[Finding, ...] = ()


def examine(
    target: Path,
    *,
    job: Path | None = None,
    data: Path | None = None,
    against: Path | None = None,
    plan: Path | None = None,
    batch_size: int = 8,
    images: int | None = None,
) -> Examined:
    """Look at a file of readings, a run.json or a checkpoint.

    Args:
        job: for a checkpoint: the model and its data; data: a manifest of images and captions; against: another
            checkpoint; plan: of a run.json; images: so many first ones of the manifest.

    Raises:
        InputError: the target is none of these or holds no reading, or what is needed to look at it does not fit it.
    """
    if not target.exists():
        raise InputError("no such file or folder", file=target)
    is_run = target.is_file() and target.suffix not in SUFFIXES
    if is_run and (job is not None or data is not None):
        raise InputError("--job and --data are for checkpoints, this is the file of a run", file=target)
    if plan is not None and not (is_run and not _has_schema(target)):
        raise InputError("--plan is for a run.json, this is none", file=target)
    if is_run and _has_schema(target):
        taken, silent = load_readings(target), load_silent(target)
        if not taken:
            why = "".join(f"; {monitor}: {reason}" for monitor, reason in silent.items())
            raise InputError(f"no reading was taken, so nothing can be said of this run{why}", file=target)
        return Examined(readings=taken, silent=silent)
    if is_run:
        return Examined(readings=run_readings(load_run(target), None if plan is None else load_plan(plan)))
    readings = weight_readings(target)
    if any(reading.fired for reading in readings) or job is None:  # with such weights every probe shows the same
        return Examined(readings=tuple(readings))
    if data is None:
        return Examined(readings=(*readings, *probe_readings(target, job, batch_size)))
    found = read_captions(data, images)
    result = checkpoint_alignment(target, job, found)
    if against is None:
        return Examined(readings=tuple(readings), alignment=result)
    difference = compare_alignment(result, checkpoint_alignment(against, job, found))
    findings = (_worse(difference, against),) if difference.worse else ()
    return Examined(readings=tuple(readings), alignment=result, difference=difference, findings=findings)


def _has_schema(path: Path) -> bool:
    """Whether the first line is the header of a file of readings."""
    try:
        with path.open(errors="replace") as file:
            first = json.loads(file.readline(100_000))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and str(first.get("schema", "")).startswith("mmplan.health/")


def _worse(difference: Difference, against: Path) -> Finding:
    change = difference.changes["alignment error"]
    return Finding(
        monitor="alignment",
        of=f"against {against.name}",
        began=0,
        last=0,
        readings=1,
        value=change.value,
        limit=0.0,
        certainty=0.95,
        follows="",
        evidence=f"the alignment error is {change.value:.4f} higher, 95 % from {change.least:.4f} to {change.most:.4f}",
        advice="keep the other checkpoint, and look at the health file of the steps between the two",
        source="the interval of a paired bootstrap over images lies above 0",
        detail={},
    )
