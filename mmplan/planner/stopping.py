"""How a search ends before it is done: limits in seconds, and questions asked now and then."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

# Several times what any shipped scenario takes to a gap of 1 % on two cores (8 CPU s; benchmarks/optimize.py).
TIME_LIMIT_S = 60.0
# Of counted work (schedules/search/effort.py): the same on every machine, slower on a slow one.
SCHEDULE_SEARCH_S = 1.0


def never() -> bool:
    """The `stop` of a caller who waits for the end."""
    return False


class Stopped(Exception):
    """`stop` said so before there was an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadline:
    """The end of a search by the clock, or earlier when `stop` says so."""

    limit_s: float
    stop: Callable[[], bool] = never
    started_s: float = field(default_factory=perf_counter)

    @property
    def spent_s(self) -> float:
        return perf_counter() - self.started_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.limit_s - self.spent_s)

    def passed(self) -> bool:
        return self.stop() or self.spent_s > self.limit_s

    def within(self, limit_s: float) -> "Deadline":
        """From now at most `limit_s`, and not beyond this one."""
        ends_s = min(self.limit_s, self.spent_s + limit_s)
        return Deadline(limit_s=ends_s, stop=self.stop, started_s=self.started_s)


NO_DEADLINE = Deadline(limit_s=float("inf"))
