"""The least peak memory that any plan can reach, with time set aside: what an infeasible scenario is short of."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmplan.planner.configuration import Configuration
from mmplan.planner.contract import GroupGraph
from mmplan.planner.cut_problem import CutEdge, CutProblem
from mmplan.planner.cut_result import CutResult
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import build_problem
from mmplan.planner.quantise import ceil_bytes
from mmplan.planner.space import stage_layers
from mmplan.planner.stage_dp import MAX_WIDTH, cut_by_dp
from mmplan.planner.upsets import Upsets

PRECISION = 0.01  # of the peak; finer does not change what a user would do
MAX_ROWS = 3_000_000  # label extensions per question, some 3 s
MOST_CONFIGURATIONS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastMemory:
    """The cut of least peak, without the device's reserve; within PRECISION of the least where `proved`."""

    configuration: Configuration
    stages: tuple[tuple[str, ...], ...]
    peak_bytes: int
    proved: bool


def least_memory(
    prices: Prices, groups: GroupGraph, upsets: Upsets, configurations: Sequence[Configuration]
) -> LeastMemory:
    """Best-first over an even spread; each configuration by bisection on the capacity."""
    problems = {one: memory_problem(build_problem(prices, groups, one)) for one in leanest(configurations)}
    order = sorted(problems, key=lambda one: (even_spread_bytes(problems[one]), one))
    best: LeastMemory | None = None
    for tried, one in enumerate(order):
        enough = best is not None and (
            tried >= MOST_CONFIGURATIONS or even_spread_bytes(problems[one]) >= best.peak_bytes * (1 - PRECISION)
        )
        if enough:
            break
        found = _bisect(problems[one], upsets, best.peak_bytes if best is not None else None)
        if found is not None:
            peak_bytes, stage_of, proved = found
            best = LeastMemory(
                configuration=one,
                stages=stage_layers(groups, stage_of, one.pp),
                peak_bytes=peak_bytes,
                proved=proved and tried < MOST_CONFIGURATIONS,
            )
    assert best is not None
    return best


def leanest(configurations: Sequence[Configuration]) -> tuple[Configuration, ...]:
    """One per (tp, pp, schedule), as good in memory as any other.

    With s samples per microbatch and b samples per replica, min(b / s, depth) * s grows with s and with b: the smallest
    microbatch of the most replicas holds the least.
    """
    best: dict[tuple[int, int, str], Configuration] = {}
    for one in sorted(configurations, key=lambda one: (-one.dp, one.microbatch_size)):
        best.setdefault((one.tp, one.pp, one.schedule), one)
    return tuple(best.values())


def fits(problem: CutProblem, upsets: Upsets, *, width: int = MAX_WIDTH) -> CutResult:
    """A cut of a memory problem within its capacity, if there is one; a small width may miss it."""
    return cut_by_dp(problem, upsets, cutoff_ns=2, width=width, max_rows=MAX_ROWS)


def memory_problem(problem: CutProblem) -> CutProblem:
    """The same problem where everything takes no time."""
    nothing = (0,) * problem.groups
    edges = tuple(CutEdge(producer=edge.producer, consumer=edge.consumer, lag_ns=0) for edge in problem.edges)
    return replace(
        problem,
        work_ns=nothing,
        finish_ns=nothing,
        trainable=(False,) * problem.groups,
        edges=edges,
        finish_fixed_ns=0,
    )


def even_spread_bytes(problem: CutProblem) -> int:
    """No cut has a lower peak: the mean over stages, and the largest group, with as few in flight as can be."""
    alive = problem.least_in_flight
    total = sum(problem.state_bytes) + alive * sum(problem.kept_bytes)
    largest = max(s + alive * k for s, k in zip(problem.state_bytes, problem.kept_bytes, strict=True))
    return max(-(-total // problem.stages), largest)


def _bisect(problem: CutProblem, upsets: Upsets, below_bytes: int | None) -> tuple[int, tuple[int, ...], bool] | None:
    """Capacity, cut and whether exhausted searches left no doubt; None when nothing is below `below_bytes`."""
    low = even_spread_bytes(problem)  # nothing fits below
    ceiling = sum(problem.state_bytes) + problem.most_in_flight * sum(problem.kept_bytes)
    high = ceiling if below_bytes is None else below_bytes
    cut: tuple[int, ...] | None = None
    proved = True
    trial = low
    grow = 1 + PRECISION
    while cut is None or high - low > PRECISION * high:
        answer = fits(replace(problem, capacity_bytes=trial), upsets)
        proved &= not answer.exhausted
        if answer.stage_of is not None:
            high, cut = trial, answer.stage_of
        elif trial >= high:
            return None
        else:
            low = trial
        # from the even spread upwards in growing steps, then halving
        grow = 2 * grow - 1
        trial = (low + high + 1) // 2 if cut is not None else min(high, ceil_bytes(low * grow))
    return high, cut, proved
