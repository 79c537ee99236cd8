"""The loss scales of a model's parts, gradients that pass from one part into another, and who backs off.

Used by `ModalityGradScaler` in loops of one's own, and by `mmplan execute`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmplan.runtime.numerics.boundary import Crossings, cross, in_other_scale
from mmplan.runtime.numerics.loss_scale import INIT_SCALE, LossScale, ScaleRule

# What ranks agree on for each part, by one maximum: columns of `PartScales.flags`.
FOUND, SEEN, GUILTY, TAINTED, PASSED = range(5)


@dataclass(slots=True)
class PartScales:
    """Scales by part, alike on all ranks.

    Attributes:
        of: by part.
        crossings: what passed between parts since the last `move`.
    """

    of: dict[str, LossScale]
    rule: ScaleRule = field(default_factory=ScaleRule)
    crossings: Crossings = field(default_factory=Crossings)

    def ratio(self, source: str, target: str) -> float:
        """By which a gradient that comes back from `target` into `source` is multiplied."""
        return self.of[source].scale / self.of[target].scale

    def cross(self, x: Tensor, source: str, target: str) -> Tensor:
        """`x`, computed in one part and used in another; its gradient changes scale on the way back."""
        return cross(
            x, self.ratio(source, target), lambda gradient: self.crossings.note(gradient, source=source, target=target)
        )

    def passed(self, gradient: Tensor, source: str, target: str) -> Tensor:
        """A gradient that goes back from `target` into `source`, in the scale of the latter."""
        self.crossings.note(gradient, source=source, target=target)
        return in_other_scale(gradient, self.ratio(source, target))

    def flags(self, largest: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """What this rank saw: [parts, 5] of 0 and 1. `largest`: magnitude in the gradients of a part."""
        flags = torch.zeros(len(self.of), 5, device=device)
        crossings = self.crossings
        for index, part in enumerate(self.of):
            if part in largest:
                flags[index, FOUND] = ~torch.isfinite(largest[part])
                flags[index, SEEN] = largest[part] > 0
            for column, noted in ((SEEN, crossings.seen), (GUILTY, crossings.guilty), (TAINTED, crossings.tainted)):
                if part in noted:
                    flags[index, column] = flags[index, column].maximum(noted[part].to(device))
            flags[index, PASSED] = part in crossings.passed
        return flags

    def move(self, agreed: Tensor) -> dict[str, float]:
        """Back off or grow by what all ranks saw, and forget it; returns the new scales of parts that backed off.

        The part to blame is where an overflow began: one into which it only came back from another keeps its scale. A
        rank sees this of its own part of a pipeline alone, so what it takes for a beginning counts only if no rank saw
        the part spoilt from outside; in a ring of parts, where each is, all beginnings do. A part without gradients
        keeps its scale.
        """
        rows = dict(zip(self.of, agreed.bool().tolist(), strict=True))
        began = {part for part, row in rows.items() if row[GUILTY]}
        bad = began | {part for part, row in rows.items() if row[FOUND]}
        blamed = {part for part in bad if not rows[part][TAINTED]} or began or bad
        for part, row in rows.items():
            if part in blamed:
                self.of[part] = self.of[part].after_overflow(self.rule)
            elif row[SEEN] and not row[FOUND] and not row[TAINTED]:
                self.of[part] = self.of[part].after_quiet(self.rule)
        self.crossings = Crossings()
        return {part: self.of[part].scale for part in self.of if part in blamed}

    def state(self) -> dict[str, dict[str, Any]]:
        """Scales and trackers by part, under the keys of torch's scaler."""
        return {
            "scale": {part: one.scale for part, one in self.of.items()},
            "_growth_tracker": {part: one.quiet_steps for part, one in self.of.items()},
        }

    def load(self, scales: Mapping[str, float], quiet_steps: Mapping[str, int]) -> None:
        """Raises ValueError where these are of other parts."""
        if set(scales) != set(self.of):
            raise ValueError(f"a state of {', '.join(sorted(scales))} for {', '.join(sorted(self.of))}")
        self.of = {part: LossScale(scale=scales[part], quiet_steps=quiet_steps[part]) for part in self.of}


def part_scales(parts: Iterable[str], init_scale: float = INIT_SCALE, rule: ScaleRule | None = None) -> PartScales:
    """All parts begin with the same scale."""
    return PartScales({part: LossScale(scale=init_scale) for part in parts}, rule or ScaleRule())
