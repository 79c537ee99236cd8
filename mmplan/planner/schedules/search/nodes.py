"""A schedule problem as numbered actions with arrays: what every search method works on.

Actions are numbered by (kind, stage, microbatch) in that order, those that do not exist left out. Only F, I, W occur: a
whole backward is I followed by W.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from mmplan.planner.schedule import Compute, ComputeKind, Schedule
from mmplan.planner.schedules.problem import ScheduleProblem

KINDS: tuple[ComputeKind, ...] = ("F", "I", "W")

Arc = tuple[int, float]  # the other action, seconds between its end and this one's start


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """Actions of a problem and what must come before what.

    Attributes:
        actions: what each number is.
        lanes: numbers of each (kind, stage) that exists, in microbatch order; a schedule keeps this order.
        before, after: data arcs, and from each action of a lane to the next.
        delivery_s: what is added to a rank's last end. Zero for makespans. When the longest span of a rank is what
            counts, ranks that can start early get more, and all lengths are `offset_s` above the span.
    """

    problem: ScheduleProblem
    actions: tuple[Compute, ...]
    number: dict[Compute, int]
    seconds: tuple[float, ...]
    memory: tuple[float, ...]
    rank: tuple[int, ...]
    lane: tuple[int, ...]
    lanes: tuple[tuple[int, ...], ...]
    before: tuple[tuple[Arc, ...], ...]
    after: tuple[tuple[Arc, ...], ...]
    delivery_s: tuple[float, ...]
    offset_s: float

    def of_rank(self, rank: int) -> np.ndarray:
        return np.flatnonzero(np.array(self.rank) == rank)

    def orders(self, schedule: Schedule) -> list[list[int]]:
        """Numbers of a schedule's actions; a whole backward becomes I and W."""
        numbers = []
        for order in schedule:
            row = []
            for action in order:
                kinds: tuple[ComputeKind, ...] = ("I", "W") if action.kind == "B" else (action.kind,)
                parts = [Compute(action.stage, kind, action.microbatch) for kind in kinds]
                row += [self.number[part] for part in parts if part in self.number]
            numbers.append(row)
        return numbers

    def schedule(self, orders: list[list[int]]) -> Schedule:
        return tuple(tuple(self.actions[number] for number in order) for order in orders)


def build_nodes(problem: ScheduleProblem, *, spans: bool = False) -> Nodes:
    """Numbers and arcs of a problem.

    Args:
        spans: compare schedules by the longest span of a rank. Every rank starts with its first forward as early as it
            can be there, so spans are ends less constants.
    """
    actions: list[Compute] = []
    lanes: list[tuple[int, ...]] = []
    for kind in KINDS:
        for index, stage in enumerate(problem.stages):
            if (kind == "I" and not stage.has_backward) or (kind == "W" and not stage.has_weight):
                continue
            worked = [k for k in range(problem.microbatches) if k not in stage.skipped]
            if worked:
                lanes.append(tuple(range(len(actions), len(actions) + len(worked))))
                actions += [Compute(index, kind, k) for k in worked]
    number = {action: index for index, action in enumerate(actions)}
    before: list[list[Arc]] = [[] for _ in actions]
    for lane in lanes:
        for early, late in itertools.pairwise(lane):
            before[late].append((early, 0.0))
    needed: dict[str, ComputeKind] = {"I": "F", "W": "I"}
    for action, index in number.items():
        if action.kind in needed:
            before[index].append((number[Compute(action.stage, needed[action.kind], action.microbatch)], 0.0))
    for edge in problem.edges:
        for k in range(problem.microbatches):
            _join(before, number, Compute(edge.source, "F", k), Compute(edge.target, "F", k), edge.forward_s)
            if edge.carries_grad:
                _join(before, number, Compute(edge.target, "I", k), Compute(edge.source, "I", k), edge.backward_s)
    after: list[list[Arc]] = [[] for _ in actions]
    for index, arcs in enumerate(before):
        for other, lag_s in arcs:
            after[other].append((index, lag_s))
    stages = problem.stages
    first_s = _first_starts(problem) if spans else [0.0] * problem.ranks
    return Nodes(
        problem=problem,
        actions=tuple(actions),
        number=number,
        seconds=tuple(stages[a.stage].seconds(a.kind, a.microbatch) for a in actions),
        memory=tuple(stages[a.stage].memory_change(a.kind, a.microbatch) for a in actions),
        rank=tuple(stages[a.stage].rank for a in actions),
        lane=tuple(lane for lane, numbers in enumerate(lanes) for _ in numbers),
        lanes=tuple(lanes),
        before=tuple(map(tuple, before)),
        after=tuple(map(tuple, after)),
        delivery_s=tuple(max(first_s) - start_s for start_s in first_s),
        offset_s=max(first_s),
    )


def _first_starts(problem: ScheduleProblem) -> list[float]:
    """When the first microbatch can reach each rank."""
    start_s = [0.0] * len(problem.stages)
    for edge in sorted(problem.edges, key=lambda edge: edge.source):
        arrival_s = start_s[edge.source] + problem.stages[edge.source].forward_s[0] + edge.forward_s
        start_s[edge.target] = max(start_s[edge.target], arrival_s)
    return [min(start_s[stage] for stage in problem.stages_of(rank)) for rank in range(problem.ranks)]


def _join(before: list[list[Arc]], number: dict[Compute, int], early: Compute, late: Compute, lag_s: float) -> None:
    if early in number and late in number:
        before[number[late]].append((number[early], lag_s))
