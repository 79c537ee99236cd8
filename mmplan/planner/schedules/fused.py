"""Families with whole backwards and one stage per rank, on any DAG of stages: GPipe, 1F1B, eager 1F1B.

They differ in how many forwards a stage admits before its first backward. 1F1B (Narayanan et al., SC 2021, section
2.2.1): the stages on the longest path from it to a sink, so that parallel encoders fill the pipeline alike and a
generator behind the backbone counts like further stages. Eager 1F1B (Zhuang et al., arXiv 2211.05322, section 4): twice
that less one, which hides transfers. GPipe (Huang et al., NeurIPS 2019): all. A stage without backward has only
forwards and holds nothing.
"""

from mmplan.planner.schedule import Compute, Schedule
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem


def gpipe(problem: ScheduleProblem) -> Schedule | NotApplicable:
    return _admitting(problem, [problem.microbatches] * len(problem.stages))


def one_f_one_b(problem: ScheduleProblem) -> Schedule | NotApplicable:
    return _admitting(problem, list(problem.depths()))


def eager_one_f_one_b(problem: ScheduleProblem) -> Schedule | NotApplicable:
    return _admitting(problem, [2 * depth - 1 for depth in problem.depths()])


def _admitting(problem: ScheduleProblem, admitted: list[int]) -> Schedule | NotApplicable:
    """`admitted[s]` forwards of stage `s`, then one backward and one forward in turn, then the remaining backwards."""
    orders: list[tuple[Compute, ...]] = []
    for rank in range(problem.ranks):
        stages = problem.stages_of(rank)
        if len(stages) != 1:
            return NotApplicable(f"rank {rank} holds {len(stages)} stages, this schedule is for one")
        backward = problem.stages[stages[0]].has_backward
        orders.append(stage_order(stages[0], problem.microbatches, admitted[stages[0]], backward))
    return tuple(orders)


def stage_order(stage: int, microbatches: int, admitted: int, has_backward: bool) -> tuple[Compute, ...]:
    """The order of one stage that admits so many forwards before its first backward."""
    if not has_backward:
        return tuple(Compute(stage, "F", microbatch) for microbatch in range(microbatches))
    admitted = min(admitted, microbatches)
    order = [Compute(stage, "F", microbatch) for microbatch in range(admitted)]
    for microbatch in range(microbatches):
        order.append(Compute(stage, "B", microbatch))
        if admitted + microbatch < microbatches:
            order.append(Compute(stage, "F", admitted + microbatch))
    return tuple(order)
