"""Errors put in on purpose into a plan of a job: what each changes while the plan runs."""

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from mmplan.runtime.ghost.stage import GhostStage
from mmplan.runtime.network import all_reduce
from mmplan.runtime.weighted_stage import WeightedStage

WRONG_SCALE, NO_WEIGHTS, STALE = "gradients times 1 / dp", "a weight gradient left out", "stale features"
FAULTS = (WRONG_SCALE, NO_WEIGHTS, STALE)
FORWARD_OF, WEIGHTS_OF = GhostStage.forward, WeightedStage.backward_weight


def faulty(fault: str) -> Any:
    """A context in which stages make the error."""
    return {
        WRONG_SCALE: patch("mmplan.runtime.flat.all_reduce", _mean),
        NO_WEIGHTS: patch.object(WeightedStage, "backward_weight", _but_for_one),
        STALE: patch.object(GhostStage, "forward", _stale),
    }[fault]


def _mean(x: Tensor, group: dist.ProcessGroup) -> None:
    """As DDP does, over replicas that have each a part of the sum."""
    all_reduce(x, group)
    x /= group.size()


def _but_for_one(stage: WeightedStage, microbatch: int) -> None:
    if microbatch != 1:
        WEIGHTS_OF(stage, microbatch)


def _stale(stage: GhostStage, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor is the first one of its name."""
    first = stage.__dict__.setdefault("first_received", {})
    return FORWARD_OF(stage, microbatch, {name: first.setdefault(name, x.clone()) for name, x in received.items()})
