"""The best stage cut of one configuration: narrow runs of the dynamic program find it, a wide one proves it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mmplan.planner.cut_problem import CutProblem
from mmplan.planner.cut_result import CutResult
from mmplan.planner.quantise import lowered_ns, scaled_ns
from mmplan.planner.stage_dp import MAX_ROWS, cap_below, cut_by_dp, never
from mmplan.planner.stage_rest import measure_rest
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
    max_rows: int = MAX_ROWS,
    stop: Callable[[], bool] = never,
) -> CutResult:
    """The best cut below `cutoff_ns`; its objective is within `tolerance` of the returned bound unless exhausted.

    With no cut in the result, no cut is below `bound_ns`: the cutoff, or, exhausted, something lower. Without a cutoff
    and not exhausted that means that no cut fits into memory.
    """
    limit_ns = value_ceiling(problem) if cutoff_ns is None else cutoff_ns
    run = partial(cut_by_dp, problem, upsets, max_rows=max_rows, stop=stop)
    if cutoff_ns is not None:
        # a cutoff from a good plan kills most configurations at once
        direct = run(cutoff_ns=cutoff_ns, max_rows=min(max_rows, DIRECT_ROWS))
        if not direct.exhausted:
            return direct
    found = _quick_cut(problem, upsets, limit_ns, run)
    if found.stage_of is None and not found.exhausted:
        return found
    target_ns = limit_ns if found.objective_ns is None else lowered_ns(found.objective_ns, tolerance)
    if found.bound_ns >= target_ns:
        return found
    proof = run(cutoff_ns=target_ns)
    rows = found.rows + proof.rows
    if proof.stage_of is not None or found.stage_of is None:
        return replace(proof, rows=rows)
    return replace(found, bound_ns=proof.bound_ns, exhausted=proof.exhausted, rows=rows)


def value_ceiling(problem: CutProblem) -> int:
    """No cut is slower: all work on one path, every edge cut, every finish added."""
    work_ns, finish_ns = sum(problem.work_ns), sum(problem.finish_ns) + problem.finish_fixed_ns
    return 1 + problem.microbatches * work_ns + sum(edge.lag_ns for edge in problem.edges) + finish_ns


def _quick_cut(problem: CutProblem, upsets: Upsets, limit_ns: int, run: Callable[..., CutResult]) -> CutResult:
    """One label per upset, under growing caps. What is found under a cap has no bound: zero."""
    rest = measure_rest(problem, upsets)
    rows = 0
    for factor in CAPS:
        cap_ns = scaled_ns(rest.floor_bottleneck_ns, factor)
        if cap_ns < cap_below(problem, rest, limit_ns):
            result = run(cutoff_ns=limit_ns, cap_ns=cap_ns, width=1)
            rows += result.rows
            if result.objective_ns is not None:
                return replace(result, bound_ns=0, rows=rows)
    result = run(cutoff_ns=limit_ns, width=1)
    return replace(result, rows=rows + result.rows)
