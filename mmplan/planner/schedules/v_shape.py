"""V-shaped families on two chunks per rank with less memory than 1F1B: V-Half, V-Min.

Rank r holds stage r and stage 2p - 1 - r. As in Qi et al. (arXiv 2405.15362, sections 3 and 4), one microbatch's work
is a building block in unit time, in which every pass takes one unit: F and I of the first and of the second chunk
move from rank to rank by constant hops, the block repeats every six units, and no two passes of a rank fall on the
same unit. The sum of the four hops sets the memory: 6 gives half of that of 1F1B (V-Half), 4 a third (V-Min). Among
the blocks of a sum the one whose order is fastest with the problem's own seconds is taken, W moved into gaps; orders
are run as early as inputs allow ("squeezed").
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from mmplan.planner.schedule import Compute, ComputeKind, Schedule
from mmplan.planner.schedules.evaluate import evaluate, fits
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem

_PERIOD = 6  # F, I and W of two chunks, one unit each
_SLACKS = 4  # units that a turn of direction may wait beyond the least
_TRIED = 24  # blocks of least latency whose orders are evaluated


def v_half(problem: ScheduleProblem) -> Schedule | NotApplicable:
    return _v_schedule(problem, 6)


def v_min(problem: ScheduleProblem) -> Schedule | NotApplicable:
    return _v_schedule(problem, 4)


def v_shaped(problem: ScheduleProblem) -> NotApplicable | None:
    """None for a chain of two chunks per rank that goes down and up the ranks."""
    p = problem.ranks
    places = [*range(p), *reversed(range(p))]
    if [stage.rank for stage in problem.stages] != places or not problem.is_chain():
        return NotApplicable("it needs a chain of two chunks per rank, laid down and up the ranks")
    if not all(stage.has_backward for stage in problem.stages):
        return NotApplicable("some stage has no backward")
    return None


@dataclass(frozen=True, slots=True)
class _Block:
    """Start units of F0, F1, I1, I0 on rank 0 and their change per rank."""

    starts: tuple[int, int, int, int]
    hops: tuple[int, int, int, int]

    def at(self, rank: int) -> tuple[int, int, int, int]:
        signs = (1, -1, 1, -1)
        first, second, third, fourth = (
            start + sign * hop * rank for start, sign, hop in zip(self.starts, signs, self.hops, strict=True)
        )
        return first, second, third, fourth


def _v_schedule(problem: ScheduleProblem, hops: int) -> Schedule | NotApplicable:
    wrong = v_shaped(problem)
    if wrong is not None:
        return wrong
    blocks = sorted(_blocks(problem.ranks, hops), key=lambda block: (max(block.starts), block.starts, block.hops))
    best: tuple[float, Schedule] | None = None
    for block in blocks[:_TRIED]:
        schedule = tuple(_rank_order(problem, block, rank) for rank in range(problem.ranks))
        span_s = evaluate(problem, schedule).span_s
        if fits(problem, schedule) and (best is None or span_s < best[0]):
            best = (span_s, schedule)
    if best is None:
        return NotApplicable("no building block of this family fits the ranks and their memory")
    return best[1]


def _blocks(p: int, total: int) -> Iterator[_Block]:
    """Blocks without two passes of a rank on one unit; both chunks have half the sum, so memory is even over ranks."""
    half = total // 2
    for outer, inner in product(range(1, half), repeat=2):
        hops = (outer, inner, half - inner, half - outer)
        for slack in product(range(_SLACKS), repeat=3):
            second = hops[0] * (p - 1) + 1 + slack[0] + hops[1] * (p - 1)
            third = second + 1 + slack[1]
            fourth = third + hops[2] * (p - 1) + 1 + slack[2] + hops[3] * (p - 1)
            block = _Block((0, second, third, fourth), hops)
            if all(len({start % _PERIOD for start in block.at(rank)}) == 4 for rank in range(p)):
                yield block


def _rank_order(problem: ScheduleProblem, block: _Block, rank: int) -> tuple[Compute, ...]:
    """All microbatches' passes of a rank by start unit; W on the first free unit of the period behind its I."""
    low, high = rank, 2 * problem.ranks - 1 - rank
    f0, f1, i1, i0 = block.at(rank)
    passes: list[tuple[int, int, ComputeKind]] = [(f0, low, "F"), (f1, high, "F"), (i1, high, "I"), (i0, low, "I")]
    taken = {start % _PERIOD for start, _, _ in passes}
    for after, stage in ((i1, high), (i0, low)):
        if problem.stages[stage].has_weight:
            unit = next(u for u in range(after + 1, after + 1 + 2 * _PERIOD) if u % _PERIOD not in taken)
            taken.add(unit % _PERIOD)
            passes.append((unit, stage, "W"))
    timed = [
        (start + _PERIOD * k, Compute(stage, kind, k))
        for k in range(problem.microbatches)
        for start, stage, kind in passes
    ]
    return tuple(action for _, action in sorted(timed))
