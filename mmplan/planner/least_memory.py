"""The least memory in which any plan fits, with time set aside: what an infeasible scenario is short of.

The relaxation of `capacity` is asked of all configurations at once and bisected on the capacity; the dynamic program
then looks for a cut in the configurations that are left, in somewhat more memory where it has to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mmplan.planner.bounds import memory_needs
from mmplan.planner.configuration import Configuration
from mmplan.planner.contract import GroupGraph
from mmplan.planner.cut_problem import CutEdge, CutProblem
from mmplan.planner.cut_result import CutResult
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import build_problem
from mmplan.planner.quantise import scaled_bytes
from mmplan.planner.space import stage_layers
from mmplan.planner.stage_dp import MAX_WIDTH, cut_by_dp
from mmplan.planner.stopping import never
from mmplan.planner.upsets import Upsets

PRECISION = 0.01  # of the capacity; finer does not change what a user would do
MAX_ROWS = 3_000_000  # label extensions per question, some 3 s
MOST_TRIES = 3  # configurations asked for a cut at one capacity, in the order of their degrees


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastMemory:
    """A cut that fits into about the least capacity, the device's reserve not counted."""

    configuration: Configuration
    stages: tuple[tuple[str, ...], ...]


def least_memory(
    prices: Prices,
    fine: GroupGraph,
    groups: GroupGraph,
    upsets: Upsets,
    configurations: Sequence[Configuration],
    *,
    stop: Callable[[], bool] = never,
) -> LeastMemory | None:
    """The leanest cut, or None when it was not found before `stop`.

    Args:
        fine: the groups that the relaxation is asked of.
        groups, upsets: what the dynamic program cuts: `fine` or coarser.
        configurations: those worth asking.
    """
    needs = memory_needs(prices, fine, configurations)
    short_bytes = build_problem(prices, fine, configurations[0]).capacity_bytes
    enough_bytes = max(1, short_bytes)
    while not needs.fits(enough_bytes).any():
        short_bytes, enough_bytes = enough_bytes, 2 * enough_bytes
        if stop():
            return None
    while enough_bytes - short_bytes > PRECISION * enough_bytes and not stop():
        middle_bytes = (short_bytes + enough_bytes) // 2
        if needs.fits(middle_bytes).any():
            enough_bytes = middle_bytes
        else:
            short_bytes = middle_bytes
    while not stop():
        fitting = [one for one, fit in zip(configurations, needs.fits(enough_bytes), strict=True) if fit]
        for one in fitting[:MOST_TRIES]:
            problem = memory_problem(build_problem(prices, groups, one))
            found = fits(problem.with_capacity(enough_bytes), upsets, stop=stop)
            if found.stage_of is not None:
                return LeastMemory(configuration=one, stages=stage_layers(groups, found.stage_of, one.pp))
        enough_bytes = scaled_bytes(enough_bytes, 1 + PRECISION)
    return None


def fits(problem: CutProblem, upsets: Upsets, *, width: int = MAX_WIDTH, stop: Callable[[], bool] = never) -> CutResult:
    """A cut of a memory problem within its capacity, if there is one; a small width may miss it."""
    return cut_by_dp(problem, upsets, cutoff_ns=2, width=width, max_rows=MAX_ROWS, stop=stop)


def memory_problem(problem: CutProblem) -> CutProblem:
    """The same problem where everything takes no time."""
    nothing = (0,) * problem.groups
    levels = tuple(replace(level, work_ns=nothing) for level in problem.levels)
    kinds = tuple(replace(kind, finish_ns=nothing, finish_fixed_ns=0) for kind in problem.kinds)
    edges = tuple(CutEdge(producer=edge.producer, consumer=edge.consumer, lag_ns=0) for edge in problem.edges)
    return replace(
        problem,
        work_ns=nothing,
        levels=levels,
        kinds=kinds,
        finish_ns=nothing,
        trainable=(False,) * problem.groups,
        edges=edges,
        finish_fixed_ns=0,
        ties=(),
    )
