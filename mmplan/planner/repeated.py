"""What the searches of one command have in common: their limits and what they look for."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mmplan.planner.objective import STEP_TIME, Objective
from mmplan.planner.result import OptimizeResult, Progress
from mmplan.planner.search import optimize
from mmplan.planner.stopping import TIME_LIMIT_S, Deadline, never
from mmplan.scenario.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of each search; see `optimize`."""

    gap: float = 0.01
    time_limit_s: float = TIME_LIMIT_S
    seed: int = 0
    objective: Objective = STEP_TIME
    schedule_search_s: float = 0.0
    on_improvement: Callable[[Progress], None] | None = None
    stop: Callable[[], bool] = never

    def until(self, deadline: Deadline) -> "Limits":
        """The same with the time that a deadline leaves to all searches together."""
        left_s, stop = min(self.time_limit_s, deadline.left_s), self.stop
        return replace(self, time_limit_s=left_s, stop=lambda: stop() or deadline.passed())

    def solve(self, scenario: Scenario) -> OptimizeResult:
        """The best plan by the objective; raises as `optimize` does."""
        return optimize(
            scenario,
            gap=self.gap,
            time_limit_s=self.time_limit_s,
            seed=self.seed,
            objective=self.objective,
            schedule_search_s=self.schedule_search_s,
            on_improvement=self.on_improvement,
            stop=self.stop,
        )
