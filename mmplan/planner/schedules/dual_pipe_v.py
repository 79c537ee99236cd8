"""DualPipeV: two chunks per rank in V shape, forwards of one beside backwards of the other (DeepSeek-AI, DualPipe,
2025).

The eight phases of the published order, rank by rank, for at least 2p microbatches: forwards; forwards of both chunks;
split backwards of the second chunk; the steady state, in which forward and backward of opposite chunks take turns (the
original runs them at the same time); and a cool-down whose second half splits backwards.
"""

from mmplan.planner.schedule import Compute, Schedule
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem
from mmplan.planner.schedules.v_shape import v_shaped


def dual_pipe_v(problem: ScheduleProblem) -> Schedule | NotApplicable:
    wrong = v_shaped(problem)
    if wrong is not None:
        return wrong
    if problem.microbatches < 2 * problem.ranks:
        return NotApplicable(f"{problem.microbatches} microbatches are fewer than twice the {problem.ranks} ranks")
    return tuple(_Order(problem, rank).run() for rank in range(problem.ranks))


class _Order:
    """Counts what a rank has issued of each chunk; postponed weight gradients wait in a queue."""

    def __init__(self, problem: ScheduleProblem, rank: int) -> None:
        self.problem, self.rank = problem, rank
        self.stages = (rank, 2 * problem.ranks - 1 - rank)
        self.order: list[Compute] = []
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.waiting: list[Compute] = []

    def run(self) -> tuple[Compute, ...]:
        p, rank, m = self.problem.ranks, self.rank, self.problem.microbatches
        for _ in range(2 * (p - rank - 1)):
            self._forward(0)
        for _ in range(rank + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(p - rank - 1):
            self._backward(1, split=True)
            self._weight()
            self._forward(1)
        for _ in range(m - 2 * p + rank + 1):
            self._forward(0)
            self._backward(1)
            self._forward(1)
            self._backward(0)
        for _ in range(p - rank - 1):
            self._backward(1)
            self._forward(1)
            self._backward(0)
        half = (rank + 1) // 2
        for step in range(rank + 1):
            self._backward(1, split=step > half or (step == half and rank % 2 == 1))
            self._backward(0, split=step >= half)
        for _ in range(p - rank - 1):
            self._weight()
            self._backward(0, split=True)
        while self.waiting:
            self._weight()
        return tuple(self.order)

    def _forward(self, chunk: int) -> None:
        self.order.append(Compute(self.stages[chunk], "F", self.forwards[chunk]))
        self.forwards[chunk] += 1

    def _backward(self, chunk: int, *, split: bool = False) -> None:
        stage, microbatch = self.stages[chunk], self.backwards[chunk]
        self.backwards[chunk] += 1
        self.order.append(Compute(stage, "I" if split else "B", microbatch))
        if split and self.problem.stages[stage].has_weight:
            self.waiting.append(Compute(stage, "W", microbatch))

    def _weight(self) -> None:
        if self.waiting:
            self.order.append(self.waiting.pop(0))
