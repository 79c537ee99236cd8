"""Building blocks of V-shaped schedules: when each rank passes one microbatch, in unit time.

As in Qi et al. (arXiv 2405.15362, section 3), F and I of the first and of the second chunk move from rank to rank by
constant hops, every pass takes one unit, the block repeats every six units, and no two passes of a rank fall on the
same unit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from mmplan.planner.schedule import Compute, ComputeKind
from mmplan.planner.schedules.problem import ScheduleProblem

PERIOD = 6  # F, I and W of two chunks, one unit each
_SLACKS = 4  # units that a turn of direction may wait beyond the least


@dataclass(frozen=True, slots=True)
class Block:
    """Start units of F0, F1, I1, I0 on rank 0 and their change per rank."""

    starts: tuple[int, int, int, int]
    hops: tuple[int, int, int, int]

    def at(self, rank: int) -> tuple[int, int, int, int]:
        signs = (1, -1, 1, -1)
        first, second, third, fourth = (
            start + sign * hop * rank for start, sign, hop in zip(self.starts, signs, self.hops, strict=True)
        )
        return first, second, third, fourth


def blocks(p: int, total: int) -> Iterator[Block]:
    """Blocks without two passes of a rank on one unit; both chunks have half the sum, so memory is even over ranks."""
    half = total // 2
    for outer, inner in product(range(1, half), repeat=2):
        hops = (outer, inner, half - inner, half - outer)
        for slack in product(range(_SLACKS), repeat=3):
            second = hops[0] * (p - 1) + 1 + slack[0] + hops[1] * (p - 1)
            third = second + 1 + slack[1]
            fourth = third + hops[2] * (p - 1) + 1 + slack[2] + hops[3] * (p - 1)
            block = Block((0, second, third, fourth), hops)
            if all(len({start % PERIOD for start in block.at(rank)}) == 4 for rank in range(p)):
                yield block


def rank_order(problem: ScheduleProblem, block: Block, rank: int) -> tuple[Compute, ...]:
    """All microbatches' passes of a rank by start unit; W on the first free unit of the period behind its I."""
    low, high = rank, 2 * problem.ranks - 1 - rank
    f0, f1, i1, i0 = block.at(rank)
    passes: list[tuple[int, int, ComputeKind]] = [(f0, low, "F"), (f1, high, "F"), (i1, high, "I"), (i0, low, "I")]
    taken = {start % PERIOD for start, _, _ in passes}
    for after, stage in ((i1, high), (i0, low)):
        if problem.stages[stage].has_weight:
            unit = next(u for u in range(after + 1, after + 1 + 2 * PERIOD) if u % PERIOD not in taken)
            taken.add(unit % PERIOD)
            passes.append((unit, stage, "W"))
    timed = [
        (start + PERIOD * k, Compute(stage, kind, k))
        for k in range(problem.microbatches)
        for start, stage, kind in passes
    ]
    return tuple(action for _, action in sorted(timed))
