"""ZB-V: two chunks per rank in V shape, the memory of 1F1B, no bubble when F, I and W take equally long.

The order by hand of Qi et al. (arXiv 2401.10241, section 6): rank r starts with 2 (p - r) - 1 forwards of its first
chunk and r of both in turn; then forwards of the second chunk bring its first backwards; in the steady state the chunks
take turns, each with F, I, W; in the cool-down W fills. Where seconds are not equal, W also
moves into gaps, in the memory of the order by hand.
"""

from dataclasses import replace

from mmplan.planner.schedule import Compute, ComputeKind, Schedule
from mmplan.planner.schedules.evaluate import memory_peaks
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem
from mmplan.planner.schedules.v_shape import filled, v_shaped


def zb_v(problem: ScheduleProblem) -> Schedule | NotApplicable:
    wrong = v_shaped(problem)
    if wrong is not None:
        return wrong
    order = tuple(_rank_order(problem, rank) for rank in range(problem.ranks))
    return filled(replace(problem, capacity=memory_peaks(problem, order)), order)


def _rank_order(problem: ScheduleProblem, rank: int) -> tuple[Compute, ...]:
    """Written for at least 2p - 1 microbatches; those beyond the step's are left out."""
    p = problem.ranks
    m = max(problem.microbatches, 2 * p - 1)
    stages = (rank, 2 * p - 1 - rank)
    counts = {(kind, chunk): 0 for kind in "FIW" for chunk in (0, 1)}
    order: list[Compute] = []

    def put(kinds: str, chunk: int) -> None:
        for letter in kinds:
            kind: ComputeKind = letter  # type: ignore[assignment]
            microbatch = counts[kind, chunk]
            counts[kind, chunk] += 1
            exists = kind != "W" or problem.stages[stages[chunk]].has_weight
            if microbatch < problem.microbatches and exists:
                order.append(Compute(stages[chunk], kind, microbatch))

    for _ in range(2 * (p - rank) - 1):
        put("F", 0)
    for _ in range(rank):
        put("F", 1)
        put("F", 0)
    for _ in range(p - rank):
        put("FIW", 1)
    while counts["F", 1] < m or counts["F", 0] < m:
        put("FIW" if counts["F", 0] < m else "IW", 0)
        put("FIW", 1)
    for _ in range(rank):
        put("I", 0)
        put("I", 1)
    for _ in range(p - rank):
        put("IW", 0)
    for chunk in (1, 0):
        while counts["W", chunk] < counts["I", chunk]:
            put("W", chunk)
    return tuple(order)
