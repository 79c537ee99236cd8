"""Rank 0's side of checkpoints: when all ranks have written their parts, the checkpoint is committed, or left out."""

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread

from pydantic import TypeAdapter

import mmplan
from mmplan.planner.plan import Plan, plan_text
from mmplan.runtime.checkpoint.folder import commit, partial_folder, prune, write_durably
from mmplan.runtime.checkpoint.manifest import PLAN, STEPS, Manifest, SavedTensor, part_name
from mmplan.runtime.checkpoint.save import WrittenPart
from mmplan.runtime.measurement import SavedCheckpoint, StepMeasurement, plan_hash
from mmplan.runtime.numerics.loss_scale import LossScale

STEP_LIST = TypeAdapter(list[StepMeasurement])


@dataclass(slots=True)
class _Open:
    """A checkpoint that ranks are writing."""

    folder: Path
    steps: tuple[StepMeasurement, ...]
    loss_scales: Mapping[str, LossScale]
    parts: dict[int, WrittenPart] = field(default_factory=dict)


class Committer:
    """Args: tensors: what the files of all ranks hold; note: hears of checkpoints that are left out."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        attempt: str,
        keep: int,
        ranks: int,
        job: bool,
        tensors: Mapping[str, SavedTensor],
        note: Callable[[str], None],
    ) -> None:
        self._plan, self._folder, self._attempt, self._keep = plan, folder, attempt, keep
        self._ranks, self._job, self._tensors, self._note = ranks, job, dict(tensors), note
        self._open: _Open | None = None
        self._thread: Thread | None = None
        self.saved: list[SavedCheckpoint] = []

    def begin(
        self, step: int, steps: Sequence[StepMeasurement], loss_scales: Mapping[str, LossScale] | None = None
    ) -> None:
        """A checkpoint behind `step` steps is being written; `steps`: those so far."""
        assert self._open is None
        self._open = _Open(partial_folder(self._folder, step, self._attempt), tuple(steps), dict(loss_scales or {}))

    def take(self, parts: Sequence[WrittenPart | None]) -> None:
        """What ranks have reported; with the last of them the checkpoint is committed, by a thread."""
        if self._open is None:
            return
        self._open.parts |= {part.rank: part for part in parts if part is not None}
        if len(self._open.parts) == self._ranks and self._thread is None:
            self._thread = Thread(target=self._close, args=(self._open,), daemon=True)
            self._thread.start()

    def finish(self, waited_s: float) -> None:
        """Wait for the commit; `waited_s`: what training has waited so far for this checkpoint to be written."""
        if self._thread is not None:
            self._thread.join()
            last = self.saved[-1]
            self.saved[-1] = replace(last, stall_s=last.stall_s + waited_s)
            self._thread = self._open = None

    def _close(self, opened: _Open) -> None:
        parts = [opened.parts[rank] for rank in range(self._ranks)]
        problem = next((part.problem for part in parts if part.problem is not None), None)
        size = 0
        try:
            if problem is None:
                manifest, checksums = self._described(opened, parts)
                size = manifest.total_bytes
                prune(self._folder, commit(opened.folder, manifest, checksums), self._keep)
        except OSError as error:
            problem = f"cannot write to '{error.filename or opened.folder}': {error.strerror}"
        except Exception as error:  # a thread has nobody to raise to
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            shutil.rmtree(opened.folder, ignore_errors=True)
            self._note(f"no checkpoint at step {parts[0].step}, the one before stays: {problem}")
        self.saved.append(
            SavedCheckpoint(
                step=parts[0].step,
                bytes=size,
                stall_s=max(part.stall_s for part in parts),
                write_s=max(part.write_s for part in parts),
                problem=problem,
            )
        )

    def _described(self, opened: _Open, parts: Sequence[WrittenPart]) -> tuple[Manifest, dict[str, str]]:
        """Writes plan and steps; returns the manifest and the checksums of all files."""
        contents = {PLAN: plan_text(self._plan).encode(), STEPS: STEP_LIST.dump_json(list(opened.steps))}
        for name, content in contents.items():
            write_durably(opened.folder / name, content)
        counts = {part.updates for part in parts if part.updates is not None}
        if len(counts) > 1:
            raise ValueError(f"ranks count unlike numbers of updates: {sorted(counts)}")
        manifest = Manifest(
            mmplan_version=mmplan.__version__,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            step=parts[0].step,
            samples=parts[0].step * self._plan.scenario.global_batch,
            updates=counts.pop() if counts else None,
            ranks=self._ranks,
            plan_hash=plan_hash(self._plan),
            job=self._job,
            files={part_name(part.rank): part.bytes for part in parts}
            | {name: len(content) for name, content in contents.items()},
            tensors=self._tensors,
            loss_scales=dict(opened.loss_scales),
        )
        checksums = {part_name(part.rank): part.sha256 for part in parts}
        return manifest, checksums | {n: hashlib.sha256(content).hexdigest() for n, content in contents.items()}
