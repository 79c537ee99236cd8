"""Why a step lasted longer or shorter than predicted: compute, bubble, communication and other, which sum to it.

The program is replayed three times, each time with more of what was measured in place of what was predicted:

1. compute: all computes (and updates) as many times longer as they were in total. How even they are does not change.
2. bubble: every single one as long as it was. What comes on top are ranks that wait for each other, because a stage, a
   replica or a microbatch took another share than predicted.
3. communication: every transfer and reduction as long as it was.
4. other: what the replay cannot explain, which is measured but neither computing nor on a link: the host between
   actions, launches, other processes, clocks of several hosts.
"""

from collections.abc import Collection
from dataclasses import dataclass

from mmplan.planner.durations import with_measured
from mmplan.planner.program import Program
from mmplan.planner.timing import Seconds, time_program
from mmplan.runtime.measured_step import link_seconds
from mmplan.runtime.measurement import Measurement

_COMPUTES, _UPDATES = ("F", "B", "I", "W"), ("STEP",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decomposition:
    """`measured_s` = `planned_s` + the four parts, in the order in which they are found."""

    planned_s: float
    compute_s: float
    bubble_s: float
    communication_s: float
    other_s: float
    measured_s: float


def decompose(program: Program, planned: Seconds, run: Measurement) -> Decomposition:
    """Args: planned: seconds of each action of the program of the recorded step, as predicted."""
    computes = {
        (program.ranks[item.rank].rank, str(item.action)): item.end_s - item.start_s
        for item in run.timeline
        if item.action.kind not in ("REDUCE", "TIE")
    }
    each = with_measured(program, planned, computes)
    scaled = _scaled(program, planned, each)
    ends_s = [_step_s(program, durations) for durations in (planned, scaled, each, link_seconds(program, run, each))]
    planned_s, scaled_s, each_s, linked_s = ends_s
    return Decomposition(
        planned_s=planned_s,
        compute_s=scaled_s - planned_s,
        bubble_s=each_s - scaled_s,
        communication_s=linked_s - each_s,
        other_s=run.step_time_s - linked_s,
        measured_s=run.step_time_s,
    )


def _scaled(program: Program, planned: Seconds, measured: Seconds) -> Seconds:
    """`planned` with computes, and likewise updates, times one factor, so that their sum is that of `measured`."""
    factor_of = {kind: _factor(program, planned, measured, kinds) for kinds in (_COMPUTES, _UPDATES) for kind in kinds}
    return tuple(
        tuple(seconds * factor_of.get(action.kind, 1.0) for action, seconds in zip(rank.actions, row, strict=True))
        for rank, row in zip(program.ranks, planned, strict=True)
    )


def _factor(program: Program, planned: Seconds, measured: Seconds, kinds: Collection[str]) -> float:
    before_s, after_s = (
        sum(
            seconds
            for rank, row in zip(program.ranks, durations, strict=True)
            for action, seconds in zip(rank.actions, row, strict=True)
            if action.kind in kinds
        )
        for durations in (planned, measured)
    )
    return after_s / before_s if before_s > 0 else 1.0


def _step_s(program: Program, durations: Seconds) -> float:
    return max(max(row) for row in time_program(program, durations).end_s if row)
