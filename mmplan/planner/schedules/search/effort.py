"""The work of a search, counted, so that it ends at the same place on every machine and under every load.

Work is named in seconds of one core of the machine that wrote `benchmarks/schedules.csv`: the prices below are a least
squares fit over its searches. A clock ends only what takes many times as long.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from mmplan.planner.stopping import never

REACHED = 1e-9  # relative: sums of seconds in another order differ by less
_TOO_SLOW = 10.0  # times the counted seconds after which the clock ends a search
_FAMILIES_S = 2.0e-4  # all families and the bound, of an action
_TURN_S, _CELL_S = 7.2e-5, 3.2e-8  # of list scheduling: a turn, and a lane in it of one of the rows
_MOVE_S, _MOVE_ACTION_S = 1.3e-4, 2.1e-7  # of tabu search: an iteration, and an action in it
_WINDOW_ACTION_S, _ACTION_S = 1.2e-4, 5.0e-7  # of a window: an action inside, and any action
_CP_SAT_S = 2.6  # of a deterministic second of CP-SAT


@dataclass(slots=True)
class Effort:
    """What a search may still do. `stop` is asked often; True ends it."""

    limit_s: float
    stop: Callable[[], bool] = never
    spent_s: float = 0.0
    _started_s: float = field(default_factory=perf_counter)

    def ended(self) -> bool:
        return self.spent_s >= self.limit_s or self.stop() or self.wall_s > _TOO_SLOW * self.limit_s

    @property
    def wall_s(self) -> float:
        return perf_counter() - self._started_s

    @property
    def deterministic_s(self) -> float:
        """What is left, in deterministic seconds of CP-SAT."""
        return max(0.0, self.limit_s - self.spent_s) / _CP_SAT_S

    def spend_families(self, actions: int) -> None:
        self.spent_s += _FAMILIES_S * actions

    def spend_turns(self, turns: int, rows: int, lanes: int) -> None:
        self.spent_s += turns * (_TURN_S + _CELL_S * rows * lanes)

    def spend_move(self, actions: int) -> None:
        self.spent_s += _MOVE_S + _MOVE_ACTION_S * actions

    def spend_window(self, inside: int, actions: int, deterministic_s: float) -> None:
        self.spent_s += _WINDOW_ACTION_S * inside + _ACTION_S * actions + _CP_SAT_S * deterministic_s
