"""Automatic zero-bubble schedules under a memory limit: ZB-1p and ZB-2p (Qi et al., arXiv 2401.10241, section 3.1).

Written after the paper's words. Warm-up: as many forwards as fit into memory; whether one may delay the first backward
is a switch. Then one F and one backward in turn; a gap of at least a W is filled with W, a smaller one too if it would
make the largest idle time of all stages larger, and memory at its limit is freed by W. A stage stays at least one
forward ahead of the next; whether it skips a forward when it is further ahead is a switch, and so is whether small gaps
are filled always. Of the combinations the one with the shortest span is kept. One switch has a position that the paper
does not name: to skip forwards only once the stage before has done all of its own, which lets the last gradients pass
first. Stages without weight gradients take part without W.
"""

from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from mmplan.planner.schedule import Compute, ComputeKind, Schedule
from mmplan.planner.schedules.evaluate import evaluate
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem
from mmplan.planner.schedules.zero_bubble import plain_chain

_Skip = Literal["never", "late", "always"]
_SKIPS: tuple[_Skip, ...] = ("never", "late", "always")


def zb_1p(problem: ScheduleProblem) -> Schedule | NotApplicable:
    return zb_automatic(problem, problem.ranks)


def zb_2p(problem: ScheduleProblem) -> Schedule | NotApplicable:
    return zb_automatic(problem, 2 * problem.ranks)


def zb_automatic(problem: ScheduleProblem, activations: int) -> Schedule | NotApplicable:
    """The best of the variants when a stage may hold so many of its own microbatches, capacity permitting."""
    wrong = plain_chain(problem)
    if wrong is not None:
        return wrong
    largest = [max(stage.held, default=0.0) for stage in problem.stages]
    limits = [min(cap, activations * held) for cap, held in zip(problem.capacity, largest, strict=True)]
    if any(held > limit for held, limit in zip(largest, limits, strict=True)):
        return NotApplicable("one microbatch does not fit into the memory of a rank")
    best: tuple[float, Schedule] | None = None
    for delay_first, skip, fill in product((False, True), _SKIPS, (False, True)):
        schedule = _Variant(problem, limits, delay_first, skip, fill).run()
        span_s = evaluate(problem, schedule).span_s
        if best is None or span_s < best[0]:
            best = (span_s, schedule)
    assert best is not None
    return best[1]


@dataclass(slots=True)
class _Lane:
    """One stage while its order grows."""

    order: list[Compute] = field(default_factory=list)
    clock_s: float = 0.0
    idle_s: float = 0.0  # since the first forward
    held: float = 0.0
    forward_end_s: list[float] = field(default_factory=list)
    input_end_s: list[float] = field(default_factory=list)
    weights: int = 0


class _Variant:
    def __init__(
        self, problem: ScheduleProblem, limits: list[float], delay_first: bool, skip: _Skip, fill: bool
    ) -> None:
        self.problem, self.limits = problem, limits
        self.delay_first, self.skip, self.fill = delay_first, skip, fill
        self.lanes = [_Lane() for _ in problem.stages]
        edges = {edge.source: edge for edge in problem.edges}
        self.forward_lag_s = [edges[stage].forward_s for stage in range(len(problem.stages) - 1)]
        self.backward_lag_s = [edges[stage].backward_s for stage in range(len(problem.stages) - 1)]

    def run(self) -> Schedule:
        self._warm_up()
        last = len(self.lanes) - 1
        for microbatch in range(self.problem.microbatches):
            for stage in range(last, -1, -1):
                if microbatch > 0 or not self.lanes[stage].forward_end_s:
                    self._maybe_forward(stage, microbatch)
                self._backward(stage, microbatch)
        for stage, lane in enumerate(self.lanes):
            while lane.weights < self.problem.microbatches:
                self._weight(stage)
        return tuple(tuple(lane.order) for lane in self.lanes)

    def _warm_up(self) -> None:
        """Forwards of every stage before its first backward, first stage first."""
        m, count = self.problem.microbatches, len(self.lanes)
        stages = self.problem.stages
        arrive_s = [0.0] * count  # of the first gradient, if nothing delays it
        total_s = sum(stage.forward_s[0] for stage in stages) + sum(self.forward_lag_s)
        for stage in range(count - 1, -1, -1):
            arrive_s[stage] = total_s
            total_s += stages[stage].input_s[0] + (self.backward_lag_s[stage - 1] if stage else 0.0)
        for stage in range(count):
            lane = self.lanes[stage]
            least = 1
            most = m if stage == 0 else max(least, len(self.lanes[stage - 1].forward_end_s) - 1)
            most = max(most, least)
            while len(lane.forward_end_s) < min(m, most):
                k = len(lane.forward_end_s)
                if lane.held + stages[stage].memory_change("F", k) > self.limits[stage] * (1 + 1e-9):
                    break
                start_s = max(lane.clock_s, self._forward_ready_s(stage, k))
                end_s = start_s + stages[stage].forward_s[k]
                limit_s = arrive_s[stage]
                if k >= least and not (start_s < limit_s if self.delay_first else end_s <= limit_s):
                    break
                self._forward(stage)

    def _forward_ready_s(self, stage: int, k: int) -> float:
        return self.lanes[stage - 1].forward_end_s[k] + self.forward_lag_s[stage - 1] if stage else 0.0

    def _maybe_forward(self, stage: int, microbatch: int) -> None:
        lane, m = self.lanes[stage], self.problem.microbatches
        k = len(lane.forward_end_s)
        if k >= m:
            return
        must = k <= microbatch or (
            stage + 1 < len(self.lanes) and k <= min(m - 1, len(self.lanes[stage + 1].forward_end_s))
        )
        if self.skip == "late" and not must and stage and len(self.lanes[stage - 1].forward_end_s) == m:
            return
        if stage and len(self.lanes[stage - 1].forward_end_s) <= k:
            if not must:
                return
            self._maybe_forward(stage - 1, k)
        while lane.held + self.problem.stages[stage].memory_change("F", k) > self.limits[stage] * (1 + 1e-9):
            if lane.weights >= len(lane.input_end_s):
                return
            self._weight(stage)
        ready_s = self._forward_ready_s(stage, k)
        if self.skip == "always" and not must:
            end_s = max(lane.clock_s, ready_s) + self.problem.stages[stage].forward_s[k]
            if end_s > self._backward_ready_s(stage, microbatch):
                return
        self._fill_gap(stage, ready_s)
        self._forward(stage)

    def _backward_ready_s(self, stage: int, microbatch: int) -> float:
        if stage + 1 == len(self.lanes):
            return self.lanes[stage].forward_end_s[microbatch]
        return self.lanes[stage + 1].input_end_s[microbatch] + self.backward_lag_s[stage]

    def _fill_gap(self, stage: int, ready_s: float) -> None:
        lane = self.lanes[stage]
        while lane.weights < len(lane.input_end_s) and ready_s > lane.clock_s + 1e-12:
            gap_s = ready_s - lane.clock_s
            whole = gap_s >= self.problem.stages[stage].weight_s[lane.weights]
            worst_s = max(other.idle_s for other in self.lanes)
            if not (whole or self.fill or lane.idle_s + gap_s > worst_s):
                return
            self._weight(stage)

    def _forward(self, stage: int) -> None:
        lane = self.lanes[stage]
        k = len(lane.forward_end_s)
        self._put(stage, "F", k, self._forward_ready_s(stage, k))
        lane.forward_end_s.append(lane.clock_s)

    def _backward(self, stage: int, microbatch: int) -> None:
        ready_s = self._backward_ready_s(stage, microbatch)
        self._fill_gap(stage, ready_s)
        self._put(stage, "I", microbatch, ready_s)
        self.lanes[stage].input_end_s.append(self.lanes[stage].clock_s)

    def _weight(self, stage: int) -> None:
        lane = self.lanes[stage]
        self._put(stage, "W", lane.weights, 0.0)
        lane.weights += 1

    def _put(self, stage: int, kind: ComputeKind, microbatch: int, ready_s: float) -> None:
        lane, work = self.lanes[stage], self.problem.stages[stage]
        start_s = max(lane.clock_s, ready_s)
        if lane.order:
            lane.idle_s += start_s - lane.clock_s
        lane.clock_s = start_s + work.seconds(kind, microbatch)
        lane.held += work.memory_change(kind, microbatch)
        lane.order.append(Compute(stage, kind, microbatch))
