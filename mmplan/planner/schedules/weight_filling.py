"""Move weight gradients of a given order into the idle time of their rank, forwards and input gradients kept in order.

A W runs where its rank would otherwise wait at least as long, where the next forward does not fit into memory without
it, and at the end. So an order found in unit time is adapted to the true seconds.
"""

from mmplan.errors import CheckError
from mmplan.planner.schedule import Compute, Schedule
from mmplan.planner.schedules.problem import ScheduleProblem


def fill_with_weights(problem: ScheduleProblem, schedule: Schedule, least_part: float = 1.0) -> Schedule:
    """The schedule with its W placed anew.

    Args:
        least_part: a gap takes a W when it is at least this part of the W's seconds.

    Raises:
        CheckError: forwards and backwards wait for each other, or do not fit into memory without W in between.
    """
    return _Filling(problem, schedule, least_part).run()


class _Filling:
    def __init__(self, problem: ScheduleProblem, schedule: Schedule, least_part: float) -> None:
        self.problem, self.least_part = problem, least_part
        self.kept = [[action for action in order if action.kind != "W"] for order in schedule]
        self.orders: list[list[Compute]] = [[] for _ in schedule]
        self.position = [0] * len(schedule)
        self.clock_s = [0.0] * len(schedule)
        self.held = [0.0] * len(schedule)
        self.pending: list[list[Compute]] = [[] for _ in schedule]
        self.end_s: dict[tuple[int, bool, int], float] = {}
        self.needs: dict[tuple[int, bool], list[tuple[int, float]]] = {}
        for edge in problem.edges:
            self.needs.setdefault((edge.target, True), []).append((edge.source, edge.forward_s))
            if edge.carries_grad:
                self.needs.setdefault((edge.source, False), []).append((edge.target, edge.backward_s))

    def run(self) -> Schedule:
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.kept)):
                while self.position[rank] < len(self.kept[rank]) and self._next(rank):
                    moved = True
        if any(place < len(order) for place, order in zip(self.position, self.kept, strict=True)):
            raise CheckError("forwards and backwards of the order wait for each other")
        for rank, waiting in enumerate(self.pending):
            self.orders[rank] += waiting
        return tuple(map(tuple, self.orders))

    def _next(self, rank: int) -> bool:
        """Place the rank's next F or I once its inputs have times."""
        action = self.kept[rank][self.position[rank]]
        forward = action.kind == "F"
        inputs = [
            (self.end_s.get((other, forward, action.microbatch)), lag_s)
            for other, lag_s in self.needs.get((action.stage, forward), ())
        ]
        if any(end_s is None for end_s, _ in inputs):
            return False
        ready_s = max((end_s + lag_s for end_s, lag_s in inputs if end_s is not None), default=0.0)
        stage = self.problem.stages[action.stage]
        change = stage.memory_change(action.kind, action.microbatch)
        while self.pending[rank] and (self._fits_before(rank, ready_s) or not self._has_room(rank, change)):
            self._place(rank, self.pending[rank].pop(0), 0.0)
        if not self._has_room(rank, change):
            raise CheckError(f"{action} does not fit into the memory of rank {rank}")
        self._place(rank, action, ready_s)
        self.end_s[action.stage, forward, action.microbatch] = self.clock_s[rank]
        if action.kind == "I" and stage.has_weight:
            self.pending[rank].append(Compute(action.stage, "W", action.microbatch))
        self.position[rank] += 1
        return True

    def _fits_before(self, rank: int, ready_s: float) -> bool:
        first = self.pending[rank][0]
        weight_s = self.problem.stages[first.stage].seconds("W", first.microbatch)
        return ready_s - self.clock_s[rank] >= self.least_part * weight_s

    def _has_room(self, rank: int, change: float) -> bool:
        return self.held[rank] + change <= self.problem.capacity[rank] * (1 + 1e-9)

    def _place(self, rank: int, action: Compute, ready_s: float) -> None:
        stage = self.problem.stages[action.stage]
        self.clock_s[rank] = max(self.clock_s[rank], ready_s) + stage.seconds(action.kind, action.microbatch)
        self.held[rank] += stage.memory_change(action.kind, action.microbatch)
        self.orders[rank].append(action)
