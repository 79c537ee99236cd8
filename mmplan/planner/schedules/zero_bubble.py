"""Zero-bubble orders by hand (Qi et al., arXiv 2401.10241, section 2): ZB-H1 with the memory of 1F1B, ZB-H2 with twice.

Rank s of p starts with p - s (H1) or 2 (p - s) - 1 (H2) forwards; then come I, a W if one more forward would exceed p
(H1) or 2 p - 1 (H2) activations, and F; in the cool-down I and W take turns, and the rest of the W end the rank. These
orders give the calculated rates of the paper's table 5.
"""

from mmplan.planner.schedule import Compute, Schedule
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem


def zb_h1(problem: ScheduleProblem) -> Schedule | NotApplicable:
    p = problem.ranks
    return _handcrafted(problem, [p - rank for rank in range(p)], p)


def zb_h2(problem: ScheduleProblem) -> Schedule | NotApplicable:
    p = problem.ranks
    return _handcrafted(problem, [2 * (p - rank) - 1 for rank in range(p)], 2 * p - 1)


def plain_chain(problem: ScheduleProblem) -> NotApplicable | None:
    """None for a chain with one stage per rank, all of them with I and W."""
    if len(problem.stages) != problem.ranks or any(s.rank != index for index, s in enumerate(problem.stages)):
        return NotApplicable("it needs one stage per rank")
    if not problem.is_chain():
        return NotApplicable("the stages are no chain")
    frozen = [index for index, stage in enumerate(problem.stages) if not stage.has_weight]
    return NotApplicable(f"stage {frozen[0]} has no weight gradients to move", frozen[0]) if frozen else None


def _handcrafted(problem: ScheduleProblem, first: list[int], most: int) -> Schedule | NotApplicable:
    wrong = plain_chain(problem)
    if wrong is not None:
        return wrong
    return tuple(
        _rank_order(rank, problem.microbatches, min(problem.microbatches, forwards), most)
        for rank, forwards in enumerate(first)
    )


def _rank_order(stage: int, m: int, first: int, most: int) -> tuple[Compute, ...]:
    order = [Compute(stage, "F", k) for k in range(first)]
    forwards, weights = first, 0
    for k in range(m):
        order.append(Compute(stage, "I", k))
        cooling = forwards == m
        if cooling or forwards + 1 - weights > most:
            order.append(Compute(stage, "W", weights))
            weights += 1
        if not cooling:
            order.append(Compute(stage, "F", forwards))
            forwards += 1
    return tuple(order + [Compute(stage, "W", k) for k in range(weights, m)])
