"""A lower bound on the makespan of every schedule that works each stage's microbatches in order, within memory.

Arcs of the data, of the order of microbatches, and of memory: while n activations fill a rank, the forward of
microbatch k cannot start before the input gradient of k - n has ended, nor, as W holds a part back, before the W of an
earlier one. Longest paths give every action a head (earliest start) and a tail (least time after its end). What must
run on one rank before an action delays it by its sum, so heads and tails are sharpened by one-machine relaxations until
they stop growing. The bound is the largest preemptive one-machine makespan of a rank (Jackson; Carlier, EJOR 1982).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmplan.planner.schedules.search.memory_bound import memory_bound_s
from mmplan.planner.schedules.search.nodes import Arc, Nodes

_SHARPENED = 4000  # actions; above, paths alone


@dataclass(frozen=True, slots=True)
class Bound:
    """No schedule has a makespan below `makespan_s`, none starts an action before its head or ends the step sooner than
    its tail after the action's end."""

    makespan_s: float
    heads: np.ndarray
    tails: np.ndarray


def lower_bound(nodes: Nodes) -> Bound:
    """The bound of a problem."""
    heads, tails = heads_and_tails(nodes)
    seconds = np.array(nodes.seconds)
    path_s = float((heads + seconds + tails).max())
    machines = [nodes.of_rank(rank) for rank in range(nodes.problem.ranks)]
    full_s = memory_bound_s(nodes, heads, tails)
    machine_s = [one_machine_s(heads[row], seconds[row], tails[row]) for row in machines if len(row)]
    return Bound(max(path_s, full_s, *machine_s), heads, tails)


def heads_and_tails(nodes: Nodes) -> tuple[np.ndarray, np.ndarray]:
    """Earliest start of every action, and least time between its end and the end of the step."""
    before = [list(arcs) for arcs in nodes.before]
    for late, arcs in memory_arcs(nodes):
        before[late] += arcs
    after: list[list[Arc]] = [[] for _ in before]
    for late, row in enumerate(before):
        for early, lag_s in row:
            after[early].append((late, lag_s))
    order = topological(before, after)
    backwards = order[::-1]
    zero, delivery_s = [0.0] * len(order), [nodes.delivery_s[rank] for rank in nodes.rank]
    if len(order) > _SHARPENED:
        return _longest(nodes, order, before, zero), _longest(nodes, backwards, after, delivery_s)
    earlier, later = _on_rank(nodes, order, before), _on_rank(nodes, backwards, after)
    heads = _sharpened(nodes, order, before, earlier, zero)
    tails = _sharpened(nodes, backwards, after, later, delivery_s)
    return heads, tails


def memory_arcs(nodes: Nodes) -> list[tuple[int, list[Arc]]]:
    """For each forward, the actions that must have ended because their memory is needed."""
    found = []
    by_lane: dict[tuple[int, str], tuple[int, ...]] = {}
    for numbers in nodes.lanes:
        first = nodes.actions[numbers[0]]
        by_lane[first.stage, first.kind] = numbers
    for (stage, kind), forwards in by_lane.items():
        work = nodes.problem.stages[stage]
        if kind != "F" or not work.has_backward or not work.held:
            continue
        capacity = nodes.problem.capacity[work.rank] * (1 + 1e-9)
        held = [work.held[nodes.actions[number].microbatch] for number in forwards]
        kept = 1 - work.released_by_input if work.has_weight else 0.0
        for k, number in enumerate(forwards):
            whole, part = held[k], held[k]
            freed: list[Arc] = []
            for j in range(k - 1, -1, -1):
                whole += held[j]
                if whole > capacity:
                    freed.append((by_lane[stage, "I"][j], 0.0))
                    break
            for j in range(k - 1, -1, -1):
                part += held[j] * kept
                if part > capacity:
                    freed.append((by_lane[stage, "W"][j], 0.0))
                    break
            if freed:
                found.append((number, freed))
    return found


def topological(before: Sequence[Sequence[Arc]], after: Sequence[Sequence[Arc]]) -> list[int]:
    waits = [len(arcs) for arcs in before]
    order = [number for number, count in enumerate(waits) if count == 0]
    for number in order:
        for later, _ in after[number]:
            waits[later] -= 1
            if waits[later] == 0:
                order.append(later)
    return order


def one_machine_s(heads: np.ndarray, seconds: np.ndarray, tails: np.ndarray) -> float:
    """Least makespan of one machine when jobs may be interrupted: for each pair of limits, least head + sum + least
    tail of the jobs with both above the limits (equal to Jackson's preemptive schedule)."""
    best = 0.0
    by_head = np.argsort(heads, kind="stable")
    heads, seconds, tails = heads[by_head], seconds[by_head], tails[by_head]
    by_tail = np.argsort(-tails, kind="stable")
    for first in range(len(heads)):
        row = by_tail[by_head_from(by_tail, first)]
        best = max(best, float((heads[first] + np.cumsum(seconds[row]) + tails[row]).max()))
    return best


def by_head_from(by_tail: np.ndarray, first: int) -> np.ndarray:
    """Which entries of the tail order lie at or behind position `first` of the head order."""
    return np.flatnonzero(by_tail >= first)


def _longest(nodes: Nodes, order: Sequence[int], before: Sequence[Sequence[Arc]], least: Sequence[float]) -> np.ndarray:
    heads = list(least)
    for number in order:
        for other, lag_s in before[number]:
            heads[number] = max(heads[number], heads[other] + nodes.seconds[other] + lag_s)
    return np.array(heads)


def _on_rank(nodes: Nodes, order: Sequence[int], before: Sequence[Sequence[Arc]]) -> list[np.ndarray]:
    """For each action the actions of its own rank that must come before it."""
    masks = [0] * len(order)
    count = len(order)
    for number in order:
        mask = 0
        for other, _ in before[number]:
            mask |= masks[other] | (1 << other)
        masks[number] = mask
    own = [0] * nodes.problem.ranks
    for number, rank in enumerate(nodes.rank):
        own[rank] |= 1 << number
    size = (count + 7) // 8
    rows = []
    for number, mask in enumerate(masks):
        bits = np.frombuffer((mask & own[nodes.rank[number]]).to_bytes(size, "little"), dtype=np.uint8)
        rows.append(np.flatnonzero(np.unpackbits(bits, bitorder="little")))
    return rows


def _sharpened(
    nodes: Nodes,
    order: Sequence[int],
    before: Sequence[Sequence[Arc]],
    earlier: Sequence[np.ndarray],
    least: Sequence[float],
) -> np.ndarray:
    """Longest paths in which an action also waits until its rank has done all that must come before it."""
    heads = np.array(least)
    seconds = np.array(nodes.seconds)
    for number in order:
        head = max([heads[number], *(heads[other] + seconds[other] + lag_s for other, lag_s in before[number])])
        row = earlier[number]
        if len(row):
            starts = heads[row]
            late_first = np.argsort(-starts)
            head = max(head, float((starts[late_first] + np.cumsum(seconds[row][late_first])).max()))
        heads[number] = head
    return heads
