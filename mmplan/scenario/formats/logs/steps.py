"""Which steps of a run are typical: without warm-up, skipped and NaN steps, other batch sizes, and outliers."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.scenario.formats.logs.lines import Iteration
from mmplan.scenario.formats.logs.other_steps import RATES
from mmplan.scenario.formats.logs.run import Run

MOST_WARM_UP = 10
SLOW_START = 1.2  # times the median of the rest
OUTLIER = 1.5  # times the median
BATCH = "global batch size"


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Seconds of typical steps, and what was left out of them and why.

    `doubt`: a sentence where no step is typical and others are taken instead; empty otherwise.
    """

    seconds: tuple[float, ...]
    iterations: tuple[Iteration, ...]
    warm_up: int
    skipped: int
    other_batch: int
    outliers: tuple[tuple[Iteration, str], ...]
    without_time: int
    batch: int | None
    doubt: str

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def percentile_s(self, fraction: float) -> float:
        """Linear between neighbours."""
        ordered = sorted(self.seconds)
        at = fraction * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def typical_steps(run: Run) -> Steps | None:
    """None where no line of the run says the time of a step."""
    timed = [iteration for iteration in run.iterations if iteration.seconds is not None]
    if not timed:
        return None
    sizes = Counter(iteration.fields[BATCH] for iteration in timed if BATCH in iteration.fields)
    batch = max(sizes, key=lambda size: (sizes[size], size)) if sizes else None
    same = [iteration for iteration in timed if iteration.fields.get(BATCH) in (batch, None)]
    doubts = []
    warm_up = _warm_up(same)
    steady = same[warm_up:]
    good = [iteration for iteration in steady if not _broken(iteration)]
    skipped = len(steady) - len(good)
    if not good:
        doubts.append(
            "every step skipped its optimizer or was NaN"
            if steady
            else "only the first step, which warms up, has a time"
        )
        good, skipped = (steady or same), (skipped if steady else 0)
        warm_up = warm_up if steady else 0
    median = statistics.median(_s(iteration) for iteration in good)
    outliers = tuple((i, _cause(run, timed, i)) for i in good if _s(i) > OUTLIER * median)
    kept = [iteration for iteration in good if _s(iteration) <= OUTLIER * median]
    return Steps(
        seconds=tuple(_s(iteration) for iteration in kept),
        iterations=tuple(kept),
        warm_up=warm_up,
        skipped=skipped,
        other_batch=len(timed) - len(same),
        outliers=outliers,
        without_time=0
        if run.timed_by
        else sum(i.seconds is None and not i.fields.keys() & RATES for i in run.iterations),
        batch=None if batch is None else int(batch),
        doubt="; ".join(doubts),
    )


def _s(iteration: Iteration) -> float:
    assert iteration.seconds is not None
    return iteration.seconds


def _cause(run: Run, timed: Sequence[Iteration], iteration: Iteration) -> str:
    """What happened between the timed line before and this one; empty where nothing is known."""
    before = max((other.step for other in timed if other.step < iteration.step), default=iteration.step - 1)
    return next((what for step, what in run.events.items() if before < step <= iteration.step), "")


def _warm_up(iterations: list[Iteration]) -> int:
    """Leading steps that are slower than 1.2 x the median of the rest; the very first of a training always is one."""
    if not iterations:
        return 0
    rest = statistics.median(_s(iteration) for iteration in iterations[1:]) if len(iterations) > 1 else 0.0
    count = 1 if iterations[0].step <= 1 else 0
    while count < min(MOST_WARM_UP, len(iterations) - 1) and _s(iterations[count]) > SLOW_START * rest:
        count += 1
    return count


def _broken(iteration: Iteration) -> bool:
    return any(iteration.fields.get(f"number of {what} iterations", 0) > 0 for what in ("skipped", "nan"))
