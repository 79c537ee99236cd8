"""Before the weights of a step are updated: are all numbers numbers, and if not, does any rank go on?"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from mmplan.runtime.finite import Unsound, order
from mmplan.runtime.loss_scaling import LossScaling
from mmplan.runtime.position import Position
from mmplan.runtime.stage import Stage
from mmplan.runtime.wait_chain import EVERYBODY


class UpdateCheck:
    """Whether the weights may be updated in this step.

    Args:
        together: of all ranks, which then agree in every step; None: each rank for itself, and the run is to end where
            one finds something.
        scaling: of losses, where these are scaled; needs `together`.
        skips_losses: a step whose loss is no number is left out too, and not only one whose scaled gradients are none.
    """

    def __init__(
        self, together: dist.ProcessGroup | None, scaling: LossScaling | None = None, *, skips_losses: bool = True
    ) -> None:
        self._together, self.scaling, self._skips_losses = together, scaling, skips_losses
        self.found: Unsound | None = None
        self.skipped = False
        self._wrong_loss = False

    def run(self, stages: Mapping[int, Stage], position: Position) -> None:
        """Let the update behind this change nothing where a number is none. Collective where ranks agree."""
        found = [unsound for stage in stages.values() if (unsound := stage.unsound()) is not None]
        self.found = min(found, key=order, default=None)
        losses = [loss for stage in stages.values() for loss in stage.losses().values()]
        counts = torch.tensor([len(found), sum(not math.isfinite(loss) for loss in losses)])
        if self._together is not None:
            position.enter("agree", EVERYBODY)
            dist.all_reduce(counts, group=self._together)
            if self.scaling is not None:
                self.scaling.look(self._together)
        for stage in stages.values() if counts[0] else ():
            stage.forgo()
        self._wrong_loss = bool(counts[1])
        may_skip = self._together is not None and (self._skips_losses or not self._wrong_loss)
        self.skipped = may_skip and bool(counts[0])

    def settle(self) -> None:
        """Behind the update: scales move."""
        if self.scaling is not None:
            self.scaling.move(blameless=self._wrong_loss)
