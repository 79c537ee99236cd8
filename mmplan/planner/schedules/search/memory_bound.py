"""A bound from how little a rank can do while its memory is full: at the start before the first gradient arrives, and
at the end after its last forward.

Until the first input gradient of any of its stages can start, a rank runs forwards only, as many as fit into memory;
the rest of that time it idles. After its last forward at most a memory full of backwards is left, and it idles until
the gradients of that forward have come round. Both parts are disjoint where not all forwards fit at once.
"""

from bisect import bisect_right
from itertools import accumulate

import numpy as np

from mmplan.planner.schedules.search.nodes import Nodes

_Lanes = dict[tuple[int, str], tuple[int, ...]]  # (stage, kind) -> actions


def memory_bound_s(nodes: Nodes, heads: np.ndarray, tails: np.ndarray) -> float:
    """The largest over the ranks; heads and tails as of `bound.heads_and_tails`."""
    return max(_rank_bound_s(nodes, rank, heads, tails) for rank in range(nodes.problem.ranks))


def _rank_bound_s(nodes: Nodes, rank: int, heads: np.ndarray, tails: np.ndarray) -> float:
    problem = nodes.problem
    load_s = problem.load_s(rank)
    bound_s = load_s + nodes.delivery_s[rank]
    lanes: _Lanes = {(nodes.actions[row[0]].stage, nodes.actions[row[0]].kind): row for row in nodes.lanes}
    keeping = [s for s in problem.stages_of(rank) if problem.stages[s].has_backward and problem.stages[s].held]
    keeping = [stage for stage in keeping if (stage, "F") in lanes]
    capacity = problem.capacity[rank] * (1 + 1e-9)
    held = {s: [problem.stages[s].held[nodes.actions[x].microbatch] for x in lanes[s, "F"]] for s in keeping}
    if not keeping or sum(map(sum, held.values())) <= capacity:
        return bound_s
    free_s = sum(
        sum(nodes.seconds[x] for x in row)
        for (stage, kind), row in lanes.items()
        if kind == "F" and problem.stages[stage].rank == rank and stage not in keeping
    )
    forward_s = {s: [nodes.seconds[x] for x in lanes[s, "F"]] for s in keeping}
    before_s = free_s + _most_s([(held[s], forward_s[s]) for s in keeping], capacity)
    first_gradient_s = min(float(heads[lanes[s, "I"][0]]) for s in keeping)
    after_s = free_s + _most_backward_s(nodes, lanes, keeping, capacity)
    last_tail_s = min(float(tails[lanes[s, "F"][-1]]) for s in keeping)
    idle_s = max(0.0, first_gradient_s - before_s)
    own = [row for (stage, _), row in lanes.items() if problem.stages[stage].rank == rank]
    least_tail_s = min(float(tails[row[-1]]) for row in own)
    return load_s + idle_s + max(least_tail_s, last_tail_s - after_s)


def _most_backward_s(nodes: Nodes, lanes: _Lanes, stages: list[int], capacity: float) -> float:
    """Most seconds of backwards that can be waiting within memory: whole ones, or W alone with the part it holds."""
    most = total_s = 0.0
    for stage in stages:
        work = nodes.problem.stages[stage]
        part = 1 - work.released_by_input
        weights = lanes.get((stage, "W"), ())
        for place, number in enumerate(lanes[stage, "I"]):
            held = work.held[nodes.actions[number].microbatch]
            weight_s = nodes.seconds[weights[place]] if weights else 0.0
            whole_s = nodes.seconds[number] + weight_s
            total_s += whole_s
            if whole_s > 0:
                most = max(most, whole_s / held if held > 0 else float("inf"))
            if weight_s > 0:
                most = max(most, weight_s / (held * part) if held * part > 0 else float("inf"))
    return min(total_s, most * capacity)


def _most_s(stages: list[tuple[list[float], list[float]]], capacity: float) -> float:
    """Most seconds of work, in order within each stage, that memory holds: exact for up to two stages, else an upper
    bound by the best ratio.

    Args:
        stages: (memory, seconds) of each stage's microbatches.
    """
    if len(stages) > 2:
        ratios = [
            s / h if h > 0 else float("inf") for held, seconds in stages for h, s in zip(held, seconds, strict=True)
        ]
        total_s = sum(sum(seconds) for _, seconds in stages)
        return min(total_s, max(ratios) * capacity)
    sums = [([0.0, *accumulate(held)], [0.0, *accumulate(seconds)]) for held, seconds in stages]
    if len(sums) == 1:
        held, seconds = sums[0]
        return seconds[bisect_right(held, capacity) - 1]
    (held, seconds), (other_held, other_s) = sums
    return max(
        seconds[count] + other_s[bisect_right(other_held, capacity - held[count]) - 1]
        for count in range(len(held))
        if held[count] <= capacity
    )
