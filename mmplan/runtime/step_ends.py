"""What all ranks do when each has ended a step: exchange what they saw, judge it, keep it, tell it and save it."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from mmplan.runtime.checkpoint.run_checkpoints import RunCheckpoints
from mmplan.runtime.finite import require_numbers
from mmplan.runtime.health.rank_taps import RankTaps
from mmplan.runtime.health.run_health import RunHealth
from mmplan.runtime.loss_scaling import LossScaling
from mmplan.runtime.measurement import OnNote, OnStep, StepMeasurement
from mmplan.runtime.position import Position
from mmplan.runtime.record import StepEnd, StepKeeper, step_end, step_measurement
from mmplan.runtime.run_options import RunOptions
from mmplan.runtime.trace import TracedStep
from mmplan.runtime.train import RankStep
from mmplan.runtime.wait_chain import EVERYBODY


@dataclass(kw_only=True, slots=True, eq=False)
class StepEnds:
    """One rank's part in it.

    Attributes:
        control: of all processes.
        listed: ranks whose bytes and times stand for those that share layers with them.
        steps: all so far, those before a resumption too.
        taps, health, scaling, checkpoints: None where the run has none; health is written by rank 0.
    """

    options: RunOptions
    control: dist.ProcessGroup
    listed: Collection[int]
    steps: list[StepMeasurement]
    position: Position
    on_step: OnStep | None
    note: OnNote
    taps: RankTaps | None
    health: RunHealth | None
    scaling: LossScaling | None
    checkpoints: RunCheckpoints | None
    kept: StepKeeper = field(default_factory=StepKeeper)
    traced: list[TracedStep] = field(default_factory=list)

    def take(self, step: int, done: RankStep) -> None:
        """Collective.

        Raises:
            RunError: a loss or gradient is no number, and the run is not to go on.
        """
        checkpoints, scaling = self.checkpoints, self.scaling
        seen = None if self.taps is None else self.taps.seen(done)
        end = step_end(done, None if checkpoints is None else checkpoints.report(), seen)
        ends: list[StepEnd] = [end] * dist.get_world_size()
        dist.all_gather_object(ends, end, group=self.control)
        totals = step_measurement(step, ends, self.listed)
        finite = {module: loss for module, loss in totals.losses.items() if math.isfinite(loss)}
        used = {} if scaling is None else scaling.used
        self.steps.append(replace(totals, losses=finite, loss_scales=used))
        unsound = [end.unsound for end in ends]
        if self.health is not None:
            self.health.take(step, totals.losses, unsound, [end.seen for end in ends])
        left_out = require_numbers(self.steps, totals.losses, unsound, max_skips=self.options.max_skips)
        if left_out:
            self.note(left_out if scaling is None else left_out + scaling.told())
        self.kept.add(step, done, totals.step_time_s)
        if self.options.trace is not None:
            self.traced.append(TracedStep(step=step, rank=done))
        if self.on_step is not None and dist.get_rank() == 0:
            self.on_step(step, totals.step_time_s, totals.losses)
        if checkpoints is not None:
            self.position.begin(step)  # waiting for a disk does not count as computing
            self.position.enter("save", EVERYBODY)
            checkpoints.take([end.written for end in ends])
            checkpoints.save_if_due(step + 1, self.steps)
