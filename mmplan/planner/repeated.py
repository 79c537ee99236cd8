"""Searches that one command makes again and again: their common limits."""

from collections.abc import Callable
from dataclasses import dataclass

from mmplan.planner.result import OptimizeResult, Progress
from mmplan.planner.search import optimize
from mmplan.planner.stopping import TIME_LIMIT_S, never
from mmplan.scenario.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of each search; see `optimize`."""

    gap: float = 0.01
    time_limit_s: float = TIME_LIMIT_S
    seed: int = 0
    schedule_search_s: float = 0.0
    on_improvement: Callable[[Progress], None] | None = None
    stop: Callable[[], bool] = never

    def solve(self, scenario: Scenario) -> OptimizeResult:
        """The plan with the shortest step; raises as `optimize` does."""
        return optimize(
            scenario,
            gap=self.gap,
            time_limit_s=self.time_limit_s,
            seed=self.seed,
            schedule_search_s=self.schedule_search_s,
            on_improvement=self.on_improvement,
            stop=self.stop,
        )
