"""What an exporter makes of a plan: files for another framework, and what that framework cannot say.

Exporters are functions of a plan: they give an `Exported`, or a `CheckError` with the need of the plan that the target
has no word for. What a target can only do in another way is linearised, and a `Loss` tells what that costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A part of the plan that the target runs in another way; `step_s` is what a step takes longer, None: unknown."""

    sentence: str
    step_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Files by name, written for a version of a target.

    `losses`: what the target does otherwise than the plan. `notes`: what the user has to fill in or to know.
    """

    target: str
    version: str
    files: Mapping[str, str]
    losses: tuple[Loss, ...] = ()
    notes: tuple[str, ...] = ()
