"""Going on from a checkpoint: the newest that is whole, laid over whatever plan the run has now.

All ranks check the files together, each its part of them. A damaged checkpoint is told, and the one before it is taken.
Every rank then reads the boxes that its own plan gives it, whoever wrote them. Nothing in a checkpoint is executed.
"""

from collections import Counter
from collections.abc import Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.checkpoint.before_run import drops_unsaid, require_same_training
from mmplan.runtime.checkpoint.boxes import Box
from mmplan.runtime.checkpoint.committing import STEP_LIST
from mmplan.runtime.checkpoint.folder import Damaged, committed, passed_over, read_manifest, renamed, require_whole
from mmplan.runtime.checkpoint.manifest import STEPS, Manifest, part_name
from mmplan.runtime.checkpoint.part import key_of, read_box
from mmplan.runtime.checkpoint.pieces import Piece, pieces_of
from mmplan.runtime.checkpoint.random_states import restore_random_states
from mmplan.runtime.checkpoint.unsaid import restore_unsaid
from mmplan.runtime.measurement import OnNote, Resumed, StepMeasurement, plan_hash
from mmplan.runtime.numerics.part_scales import PartScales
from mmplan.runtime.run_options import RunOptions
from mmplan.runtime.weighted_stage import WeightedStage


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A whole checkpoint; `damaged`: newer ones, and what is wrong with each."""

    path: Path
    manifest: Manifest
    damaged: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where a run begins: `steps` were done before, and the data has given `samples` to them."""

    found: Found | None = None
    steps: tuple[StepMeasurement, ...] = ()
    finished: bool = False  # there are no steps left

    @property
    def samples(self) -> int:
        return 0 if self.found is None else self.found.manifest.samples

    def load(self, plan: Plan, stages: Sequence[WeightedStage], scales: PartScales | None = None) -> Resumed | None:
        """Fill the stages and the loss scales from the checkpoint, if there is one. Collective."""
        if self.found is None:
            return None
        manifest = self.found.manifest
        if scales is not None and manifest.loss_scales:
            _load_scales(self.found, scales)
        counts = torch.tensor(load_state(self.found, plan, stages, dist.get_rank()))
        dist.all_reduce(counts)
        read_bytes, moved_bytes = counts.tolist()
        return Resumed(
            checkpoint=str(self.found.path),
            step=manifest.step,
            plan_hash=manifest.plan_hash,
            damaged=self.found.damaged,
            read_bytes=read_bytes,
            moved_bytes=moved_bytes,
        )


def find_start(plan: Plan, options: RunOptions, note: OnNote) -> Start:
    """The newest whole checkpoint of the folder to go on from, or the beginning. Collective.

    Raises:
        InputError: there is none although one is demanded, or it is of another training.
    """
    folder = options.checkpoints.resume
    if folder is None:
        return Start()
    for path in renamed(folder):
        note(f"{path} is passed over: {passed_over(path)}")
    found = newest_whole(folder, None)
    if found is None:
        if options.checkpoints.required:
            raise InputError("there is no checkpoint to go on from", file=folder)
        note(f"there is no checkpoint in {folder} yet: starting from the beginning")
        return Start()
    for text in found.damaged:
        note(f"{text}: this checkpoint is damaged, the one before is used")
    require_same_training(found.path, found.manifest, plan, job=options.job is not None)
    steps = STEP_LIST.validate_json((found.path / STEPS).read_bytes())
    if len(steps) != found.manifest.step:
        raise InputError(f"{STEPS} has {len(steps):,} steps, the manifest {found.manifest.step:,}", file=found.path)
    if drops_unsaid(found.path, found.manifest, plan):
        note(f"{found.path.name} is of another plan: what its ranks had yet to say of compressed gradients is left out")
    finished = found.manifest.step >= options.steps
    note(
        f"nothing is left to do: {found.path} is behind step {found.manifest.step:,} of {options.steps:,}"
        if finished
        else f"going on behind step {found.manifest.step:,} from {found.path}"
    )
    return Start(found=found, steps=tuple(steps), finished=finished)


def newest_whole(folder: Path, group: dist.ProcessGroup | None) -> Found | None:
    """The checkpoint to go on from; None where there is none at all. Collective over the group.

    Raises:
        InputError: there are some, and none is whole.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    candidates = [committed(folder) if rank == 0 else []]
    dist.broadcast_object_list(candidates, src=0, group=group)
    damaged: list[str] = []
    for path in candidates[0]:
        manifest, problem = None, None
        try:
            manifest = read_manifest(path)
            require_whole(path, manifest, sorted(manifest.files)[rank::world])
        except Damaged as error:
            problem = str(error)
        problems = [problem] * world
        dist.all_gather_object(problems, problem, group=group)
        first = next((text for text in problems if text is not None), None)
        if first is None and manifest is not None:
            return Found(path=path, manifest=manifest, damaged=tuple(damaged))
        damaged.append(f"{path.name}: {first}")
    if damaged:
        raise InputError(f"no checkpoint is whole: {'; '.join(damaged)}", file=folder)
    return None


def load_state(found: Found, plan: Plan, stages: Sequence[WeightedStage], rank: int) -> tuple[int, int]:
    """Fill the stages from a checkpoint; returns the bytes read, and those of them that other ranks had written.
    Collective over replicas where state is sharded.

    Random states, and what was not said of compressed gradients, are restored where the plan is the same; under another
    one ranks have other parts of the model.

    Raises:
        InputError: the checkpoint lacks a tensor, has it in another shape, or has one that no rank holds.
    """
    bytes_of: Counter[int] = Counter()  # by the rank that wrote them
    pieces = pieces_of(stages)
    with ExitStack() as stack, torch.no_grad():
        files: dict[int, Any] = {}
        for piece in pieces:
            bytes_of += _load(piece, found, files, stack)
    # Whoever has read less waits here, and not among its replicas, with their time-out for a step.
    _refuse_unread(found, {piece.name for piece in pieces})
    for stage in stages:
        if found.manifest.updates is not None:
            for optimizer in stage.state.optimizers:
                optimizer.updates = found.manifest.updates
        stage.state.refresh()
    if found.manifest.plan_hash == plan_hash(plan):
        restore_random_states(found.path / part_name(rank))
        restore_unsaid(found.path / part_name(rank), stages)
    return bytes_of.total(), bytes_of.total() - bytes_of[rank]


def _load_scales(found: Found, scales: PartScales) -> None:
    saved = found.manifest.loss_scales
    if saved.keys() != scales.of.keys():
        has, wanted = (", ".join(sorted(parts)) for parts in (saved, scales.of))
        raise InputError(f"the run scales losses of {wanted}, the checkpoint of {has}", file=found.path)
    scales.of = {part: saved[part] for part in scales.of}


def _load(piece: Piece, found: Found, files: dict[int, Any], stack: ExitStack) -> Counter[int]:
    """Fill a piece; returns the bytes read by the rank that wrote them."""
    saved = found.manifest.tensors.get(piece.name)
    if saved is None or saved.shape != piece.shape or set(saved.kinds) != set(piece.tensors):
        has = "nothing of it" if saved is None else _shown(saved.shape, saved.kinds)
        wanted = _shown(piece.shape, tuple(piece.tensors))
        raise InputError(f"the run has '{piece.name}' as {wanted}, the checkpoint {has}", file=found.path)
    filled = 0
    read: Counter[int] = Counter()
    for rank, offset, shape in saved.pieces:
        box = Box(offset, shape)
        common = piece.box.common(box)
        if common is None:
            continue
        filled += common.count
        try:
            if rank not in files:
                files[rank] = stack.enter_context(safe_open(found.path / part_name(rank), framework="pt"))
            for kind, tensor in piece.tensors.items():
                part = read_box(files[rank], key_of(piece.name, kind, offset), box, common)
                if part.shape != common.shape:
                    found_shape = "x".join(map(str, part.shape))
                    raise InputError(f"'{piece.name}' is {found_shape} in its file", file=found.path / part_name(rank))
                tensor[common.within(piece.box)].copy_(part)
                read[rank] += part.nbytes
        except (OSError, SafetensorError) as error:
            raise InputError(f"'{piece.name}' cannot be read: {error}", file=found.path / part_name(rank)) from error
    if filled != piece.box.count:
        raise InputError(
            f"the checkpoint has {filled:,} of {piece.box.count:,} elements of '{piece.name}'", file=found.path
        )
    return read


def _refuse_unread(found: Found, held: Set[str]) -> None:
    """Of the ranks together: the checkpoint may be of a larger model. Collective."""
    names = sorted(found.manifest.tensors)
    read = torch.tensor([name in held for name in names], dtype=torch.int32)
    dist.all_reduce(read, op=dist.ReduceOp.MAX)
    unread = [name for name, flag in zip(names, read.tolist(), strict=True) if not flag]
    if unread:
        raise InputError(
            f"the checkpoint has '{unread[0]}', which the run's model has not ({len(unread)} such tensors)",
            file=found.path,
        )


def _shown(shape: Sequence[int], kinds: Sequence[str]) -> str:
    return f"{'x'.join(map(str, shape)) or 'a number'} ({', '.join(kinds)})"
