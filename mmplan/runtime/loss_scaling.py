"""Losses of a run in fp16 are scaled. Gradients of a layer carry the scale of its modality until the update.

Scales and the rule by which they move are those of `ModalityGradScaler`. What differs: a step in which any modality
overflows changes no weight at all, because plans shard moments over ranks and count updates once for all of them.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from mmplan.planner.plan import Plan
from mmplan.runtime.numerics.collectives import reduce_
from mmplan.runtime.numerics.part_scales import PartScales, part_scales
from mmplan.runtime.optimizer import Elements, StageOptimizer
from mmplan.runtime.weighted_stage import WeightedStage


def run_scales(plan: Plan, more: Iterable[str] = ()) -> PartScales | None:
    """One scale for each modality of the model and for `more` parts; None where no module is in fp16."""
    if "fp16" not in plan.scenario.precisions:
        return None
    return part_scales(dict.fromkeys([*(module.modality for module in plan.scenario.model.modules), *more]))


class LossScaling:
    """What a rank's stages say of their gradients, and what becomes of the scales.

    Attributes:
        used: the scales of the last step, by modality.
        backed_off: those that fell behind it, and to what.
    """

    def __init__(self, scales: PartScales, stages: Sequence[WeightedStage]) -> None:
        self.scales, self._stages = scales, stages
        self.used: dict[str, float] = {}
        self.backed_off: dict[str, float] = {}
        self._flags = torch.zeros(0)
        self._gradients: dict[str, list[Tensor]] = {}
        by_optimizer: dict[StageOptimizer, dict[str, list[Elements]]] = {}
        for stage in stages:
            for one in stage.state.trained():
                part = stage.parts[one.parameter]
                self._gradients.setdefault(part, []).append(one.optimizer.gradient(one.elements))
                by_optimizer.setdefault(one.optimizer, {}).setdefault(part, []).append(one.elements)
        for optimizer, elements in by_optimizer.items():
            optimizer.unscale_by({partial(self._scale, part): places for part, places in elements.items()})

    def look(self, together: dist.ProcessGroup | None) -> None:
        """At the gradients of the step, before the update; collective over the group, which is on CPUs."""
        largest = {
            part: torch.stack(torch._foreach_norm(gradients, torch.inf)).amax().float().cpu()
            for part, gradients in self._gradients.items()
        }
        self._flags = reduce_(self.scales.flags(largest, torch.device("cpu")), together, largest=True)

    def move(self, *, blameless: bool) -> None:
        """Behind the update. `blameless`: a loss itself was no number, which no scale has caused."""
        self.used = {part: one.scale for part, one in self.scales.of.items()}
        self.backed_off = self.scales.move(torch.zeros_like(self._flags) if blameless else self._flags)
        factors = {part: one.scale / self.used[part] for part, one in self.scales.of.items()}
        if any(factor != 1 for factor in factors.values()):
            for stage in self._stages:
                for compressed in stage.state.compressed:
                    compressed.rescale({parameter: factors[part] for parameter, part in stage.parts.items()})

    def told(self) -> str:
        """Which scales fell, for who is told of the step."""
        return "".join(f"; the loss scale of '{part}' falls to {scale:,g}" for part, scale in self.backed_off.items())

    def _scale(self, part: str) -> float:
        return self.scales.of[part].scale
