"""Before the weights of a step are updated: are all numbers numbers, and if not, does any rank go on?"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from mmplan.runtime.finite import Unsound, order
from mmplan.runtime.position import Position
from mmplan.runtime.stage import Stage
from mmplan.runtime.wait_chain import EVERYBODY


class UpdateCheck:
    """Whether the weights may be updated in this step.

    Args:
        together: of all ranks, which then agree in every step; None: each rank for itself, and the run is to end where
            one finds something.
    """

    def __init__(self, together: dist.ProcessGroup | None) -> None:
        self._together = together
        self.found: Unsound | None = None
        self.skipped = False

    def run(self, stages: Mapping[int, Stage], position: Position) -> None:
        """Let the update behind this change nothing where a number is none. Collective where ranks agree."""
        found = [unsound for stage in stages.values() if (unsound := stage.unsound()) is not None]
        self.found = min(found, key=order, default=None)
        count = torch.tensor(float(len(found)))
        if self._together is not None:
            position.enter("agree", EVERYBODY)
            dist.all_reduce(count, group=self._together)
        for stage in stages.values() if count else ():
            stage.forgo()
        self.skipped = self._together is not None and bool(count)
