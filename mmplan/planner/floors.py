"""What no cut of a problem can beat, term by term, for many numbers of stages at once."""

from collections.abc import Sequence

import numpy as np

from mmplan.planner.cut_problem import CutProblem
from mmplan.planner.schedules.in_flight import in_flight_counts
from mmplan.planner.stage_order import tail_start
from mmplan.planner.upsets import BoolArray, IntArray


def heaviest_paths(problem: CutProblem) -> IntArray:
    """Per group: the heaviest path that ends with it."""
    path_ns = np.array(problem.work_ns, dtype=np.int64)
    for edge in sorted(problem.edges, key=lambda edge: edge.consumer):
        path_ns[edge.consumer] = max(path_ns[edge.consumer], problem.work_ns[edge.consumer] + path_ns[edge.producer])
    return path_ns


def bottleneck_floors(problem: CutProblem, stages: IntArray) -> IntArray:
    """[stages] no cut into so many stages has a lighter busiest stage.

    It has at least the mean, and of n groups with work w or more some stage holds ceil(n / stages).
    """
    work_ns, count = np.unique(np.array(problem.work_ns, dtype=np.int64), return_counts=True)
    so_heavy = np.cumsum(count[::-1])[::-1]
    shared = (-(-so_heavy // stages[:, None]) * work_ns).max(axis=1)
    floors: IntArray = np.maximum(-(-sum(problem.work_ns) // stages), shared)
    return floors


def finish_floors(problem: CutProblem, stages: IntArray) -> IntArray:
    """[stages] no cut ends its step sooner after the last backward."""
    return least_finish(problem.finish_ns, problem.finish_fixed_ns if any(problem.trainable) else 0, stages)


def least_finish(finish_ns: Sequence[int], fixed_ns: int, stages: IntArray) -> IntArray:
    """[stages] from the parts of all groups: the heaviest one, or the mean of a stage."""
    floors: IntArray = fixed_ns + np.maximum(max(finish_ns), -(-sum(finish_ns) // stages))
    return floors


def transfer_floors(problem: CutProblem, stages: IntArray) -> IntArray:
    """[stages] a microbatch waits at least so long for tensors between stages on its heaviest path.

    Where all groups are one chain each stage but the last sends one; else none is counted.
    """
    follow = [(edge.producer, edge.consumer) for edge in problem.edges]
    least_ns = min((edge.lag_ns for edge in problem.edges), default=0)
    chain = tail_start(problem.groups, follow) == 0
    floors: IntArray = (stages - 1) * (least_ns if chain else 0)
    return floors


def memory_may_fit(problem: CutProblem, stages: IntArray, microbatches: IntArray) -> BoolArray:
    """[stages] False where even an even spread, with as few microbatches in flight as can be, does not fit."""
    alive = in_flight_counts(problem.schedule, microbatches, 1)
    state_bytes = np.array(problem.state_bytes, dtype=np.int64)
    kept_bytes = np.array(problem.kept_bytes, dtype=np.int64)
    room_bytes = problem.capacity_bytes - problem.least_working_bytes
    spread = state_bytes.sum() + alive * kept_bytes.sum() <= stages * room_bytes
    largest = (state_bytes + alive[:, None] * kept_bytes).max(axis=1) <= room_bytes
    may: BoolArray = spread & largest
    return may


def bottleneck_floor(problem: CutProblem) -> int:
    """`bottleneck_floors` for the problem's own number of stages."""
    return int(bottleneck_floors(problem, np.array([problem.stages], dtype=np.int64))[0])


def finish_floor(problem: CutProblem) -> int:
    """`finish_floors` for the problem's own number of stages."""
    return int(finish_floors(problem, np.array([problem.stages], dtype=np.int64))[0])


def busiest_ceiling(problem: CutProblem, cutoff_ns: int) -> int:
    """The longest that the busiest stage of a cut below the cutoff can work."""
    total_ns = max(sum(level.work_ns) for level in problem.choices)
    if problem.microbatches == 1:
        return total_ns
    spare_ns = cutoff_ns - 1 - int(heaviest_paths(problem).max()) - finish_floor(problem)
    return min(total_ns, spare_ns // (problem.microbatches - 1))


def least_objective(problem: CutProblem) -> int:
    """No cut into the problem's number of stages ends its step sooner."""
    path_ns = int(heaviest_paths(problem).max())
    return (problem.microbatches - 1) * bottleneck_floor(problem) + path_ns + finish_floor(problem)
