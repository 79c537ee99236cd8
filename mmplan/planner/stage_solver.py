"""The best stage cut of one configuration: narrow runs of the dynamic program find it, a wide one proves it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mmplan.planner.cut_problem import CutProblem
from mmplan.planner.cut_result import CutResult
from mmplan.planner.floors import bottleneck_floor, busiest_ceiling
from mmplan.planner.quantise import lowered_ns, scaled_ns
from mmplan.planner.stage_dp import MAX_ROWS, cut_by_dp
from mmplan.planner.stopping import never
from mmplan.planner.upsets import Upsets

# Caps on the busiest stage, over its lower bound, tried until one gives a cut. A tight cap keeps the run short.
CAPS = (1.02, 1.1, 1.3, 2.0)
DIRECT_ROWS = 300_000  # label extensions, some 0.2 s


def solve_cut(
    problem: CutProblem,
    upsets: Upsets,
    *,
    cutoff_ns: int | None = None,
    tolerance: float = 0.0,
    busiest_ns: int = 0,
    max_rows: int = MAX_ROWS,
    stop: Callable[[], bool] = never,
) -> CutResult:
    """The best cut below `cutoff_ns`; its objective is within `tolerance` of the returned bound unless exhausted.

    With no cut in the result, no cut is below `bound_ns`: the cutoff, or, exhausted, something lower. Without a cutoff
    and not exhausted that means that no cut fits into memory.

    Args:
        busiest_ns: a proven floor of the busiest stage.
    """
    limit_ns = value_ceiling(problem) if cutoff_ns is None else cutoff_ns
    run = partial(cut_by_dp, problem, upsets, busiest_ns=busiest_ns, max_rows=max_rows, stop=stop)
    if cutoff_ns is not None:
        # a cutoff from a good plan kills most configurations at once
        direct = run(cutoff_ns=cutoff_ns, max_rows=min(max_rows, DIRECT_ROWS))
        if not direct.exhausted:
            return direct
    found = _narrow(problem, limit_ns, busiest_ns, run)
    if found.stage_of is None and not found.exhausted:
        return found
    target_ns = limit_ns if found.objective_ns is None else lowered_ns(found.objective_ns, tolerance)
    if found.bound_ns >= target_ns:
        return found
    proof = run(cutoff_ns=target_ns)
    if proof.stage_of is not None or found.stage_of is None:
        return proof
    return replace(found, bound_ns=proof.bound_ns, exhausted=proof.exhausted)


def value_ceiling(problem: CutProblem) -> int:
    """No cut is slower: all work on one path, every edge cut, every finish added."""
    work_ns = max(sum(level.path_ns or level.work_ns) for level in problem.choices)
    finish_ns = max(sum(kind.finish_ns) + kind.finish_fixed_ns for kind in problem.kinds or (problem.kind(0),))
    finish_ns += sum(tie.sum_ns + tie.copy_ns for tie in problem.ties)
    return 1 + problem.microbatches * work_ns + sum(edge.lag_ns for edge in problem.edges) + finish_ns


def quick_cut(
    problem: CutProblem, upsets: Upsets, *, busiest_ns: int = 0, stop: Callable[[], bool] = never
) -> CutResult:
    """Some good cut, without a proof unless there is none: narrow runs only."""
    run = partial(cut_by_dp, problem, upsets, busiest_ns=busiest_ns, max_rows=MAX_ROWS, stop=stop)
    return _narrow(problem, value_ceiling(problem), busiest_ns, run)


def _narrow(problem: CutProblem, limit_ns: int, busiest_ns: int, run: Callable[..., CutResult]) -> CutResult:
    """One label per upset, under growing caps. What is found under a cap has no bound: zero."""
    floor_ns = max(busiest_ns, bottleneck_floor(problem))
    for factor in CAPS:
        cap_ns = scaled_ns(floor_ns, factor)
        if cap_ns < busiest_ceiling(problem, limit_ns):
            result = run(cutoff_ns=limit_ns, cap_ns=cap_ns, width=1)
            if result.objective_ns is not None:
                return replace(result, bound_ns=0)
    return run(cutoff_ns=limit_ns, width=1)
