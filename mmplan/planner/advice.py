"""Which composition of microbatches to use: the quickest one over the data, and how much it may cost to be worth it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.planner.plan import Composition
from mmplan.planner.step_times import StepTimes

# A gain below this is within what the next draws of the data change, or not worth a change of the data loader.
_LEAST_GAIN = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """`composition` to use; `gain`: fraction of the in-order step that it saves; `break_even_s`: seconds of a step that
    composing may cost (exchange of samples, reading ahead) before keeping the order is as quick. `significant`: the
    gain is more than two standard errors of the difference over the same steps."""

    composition: Composition
    gain: float
    break_even_s: float
    significant: bool


def advise(times: Sequence[StepTimes]) -> Advice:
    """What to use; nothing that passes the memory while keeping the order does not.

    Args:
        times: of the same steps, the first in order.
    """
    in_order = times[0]
    best = min((one for one in times if one.fits or not in_order.fits), key=lambda one: one.mean_s)
    saved_s = [before - after for before, after in zip(in_order.step_s, best.step_s, strict=True)]
    mean_s = sum(saved_s) / len(saved_s)
    spread = sum((saved - mean_s) ** 2 for saved in saved_s) / max(len(saved_s) - 1, 1)
    significant = mean_s > 2 * math.sqrt(spread / len(saved_s)) and mean_s > 0
    gain = mean_s / in_order.mean_s
    if not significant or gain < _LEAST_GAIN:
        return Advice(composition="in order", gain=0.0, break_even_s=0.0, significant=significant)
    return Advice(composition=best.composition, gain=gain, break_even_s=mean_s, significant=True)
