"""The checkpoints of a run as its loop sees them, on every rank.

What ranks have written is reported with the results of the steps behind; when all have reported, rank 0 commits. The
next save and the end of the run wait for that. A checkpoint that cannot be written, or whose numbers are not finite, is
left out and the run goes on: the one before stays.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from secrets import token_hex

import torch.distributed as dist

from mmplan.planner.plan import Plan
from mmplan.runtime.checkpoint.boxes import Box
from mmplan.runtime.checkpoint.committing import Committer
from mmplan.runtime.checkpoint.folder import lock, partial_folder, remove_unfinished
from mmplan.runtime.checkpoint.manifest import SavedPiece, SavedTensor
from mmplan.runtime.checkpoint.pieces import pieces_of, to_write
from mmplan.runtime.checkpoint.random_states import random_states
from mmplan.runtime.checkpoint.save import PartWriter, WrittenPart
from mmplan.runtime.checkpoint.unsaid import unsaid_gradients
from mmplan.runtime.measurement import OnNote, SavedCheckpoint, StepMeasurement
from mmplan.runtime.numerics.part_scales import PartScales
from mmplan.runtime.places import place_of
from mmplan.runtime.run_options import RunOptions
from mmplan.runtime.weighted_stage import WeightedStage

_Described = tuple[str, tuple[int, ...], tuple[str, ...], Box]  # of a piece: name, shape of the parameter, kinds, box


class RunCheckpoints:
    """All methods but `report` are collective; the constructor too.

    Args:
        timeout_s: of writing.
        note: hears of checkpoints that are left out, on rank 0.
    """

    def __init__(
        self,
        plan: Plan,
        options: RunOptions,
        stages: Sequence[WeightedStage],
        scales: PartScales | None = None,
        *,
        timeout_s: float,
        note: OnNote,
    ) -> None:
        self._scales = scales
        rank, folder = dist.get_rank(), options.checkpoints.folder
        assert folder is not None
        self._folder, self._every, self._steps = folder, options.checkpoints.every, options.steps
        if rank == 0:
            self._lock = lock(folder)
            remove_unfinished(folder)
        self._timeout_s = timeout_s
        # Whoever waits for a slow disk waits longer than for a step.
        self._group = group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        pieces = to_write(pieces_of(stages), plan, place_of(plan, rank)) if stages else []
        attempt = [token_hex(4)]
        dist.broadcast_object_list(attempt, src=0, group=group)
        self._attempt = attempt[0]
        self._writer = PartWriter(
            rank, pieces, lambda: random_states() | unsaid_gradients(stages), lambda: updates_of(stages)
        )
        described: list[_Described] = [(p.name, p.shape, tuple(p.tensors), p.box) for p in pieces]
        gathered = [described] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(described, gathered, dst=0, group=group)
        self._committer: Committer | None = None
        if gathered is not None:
            self._committer = Committer(
                plan,
                folder,
                attempt=self._attempt,
                keep=options.checkpoints.keep,
                ranks=len(gathered),
                job=options.job is not None,
                tensors=_saved_tensors(gathered),
                note=note,
            )
        self._started = False

    def report(self) -> WrittenPart | None:
        """What this rank has written since it was asked last, for rank 0 to take."""
        return self._writer.report()

    def take(self, parts: Sequence[WrittenPart | None]) -> None:
        """What all ranks have reported, on rank 0."""
        if self._committer is not None:
            self._committer.take(parts)

    def save_if_due(self, step: int, steps: Sequence[StepMeasurement]) -> None:
        """Behind `step` steps of training; `steps`: those so far, on rank 0."""
        if step == self._steps or (self._every is not None and step % self._every == 0):
            self._settle()
            if self._committer is not None:
                self._committer.begin(step, steps, None if self._scales is None else self._scales.of)
            self._writer.start(step, partial_folder(self._folder, step, self._attempt))
            self._started = True

    def finish(self) -> tuple[SavedCheckpoint, ...]:
        """Wait for the last checkpoint; returns all, on rank 0."""
        self._settle()
        if self._committer is None:
            return ()
        self._lock.close()
        return tuple(self._committer.saved)

    def _settle(self) -> None:
        """Until the checkpoint before is there or left out, on all ranks."""
        if not self._started:
            return
        started = time.perf_counter()
        self._writer.wait(self._timeout_s)
        parts: list[WrittenPart | None] | None = None if self._committer is None else [None] * self._group.size()
        dist.gather_object(self._writer.report(), parts, dst=0, group=self._group)
        if self._committer is not None and parts is not None:
            self._committer.take(parts)
            self._committer.finish(time.perf_counter() - started)
        dist.barrier(self._group)  # whoever went ahead would wait in a step, with a time-out that is not for writing
        self._started = False


def updates_of(stages: Sequence[WeightedStage]) -> int | None:
    """Steps that the moments of the stages have seen."""
    counts = (optimizer.updates for stage in stages for optimizer in stage.state.optimizers)
    return max((count for count in counts if count is not None), default=None)


def _saved_tensors(described: Sequence[Sequence[_Described]]) -> dict[str, SavedTensor]:
    """What the files of all ranks hold, by parameter."""
    tensors: dict[str, SavedTensor] = {}
    for rank, pieces in enumerate(described):
        for name, shape, kinds, box in pieces:
            known = tensors.get(name, SavedTensor(shape=shape, kinds=kinds, pieces=()))
            added = (*known.pieces, SavedPiece(rank, box.offset, box.shape))
            tensors[name] = SavedTensor(shape=shape, kinds=kinds, pieces=added)
    return tensors
