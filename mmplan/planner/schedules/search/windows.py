"""Re-order a window of time on all ranks to the optimum, with CP-SAT; a window over everything proves a schedule.

What lies before the window keeps its times, what lies behind it its order, so that the rest of the step enters as a
release time and as a tail of each action. Whole numbers are made here: durations down, so that a proof holds for the
true seconds; the caller evaluates an order that comes back exactly.
"""

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from ortools.sat.python import cp_model

from mmplan.planner.schedule import Compute, ComputeKind
from mmplan.planner.schedules.search.orders import Orders

_TICKS = 10**6  # of time in a makespan; of memory in a capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowAnswer:
    """Rows of all ranks, None where nothing was found; no order of the window has a makespan below `bound_s`.

    `actions` inside the window and `deterministic_s` of CP-SAT are what it took.
    """

    rows: list[list[int]] | None
    bound_s: float
    actions: int
    deterministic_s: float


@dataclass(slots=True)
class _Model:
    """Variables of one window: `start[number]`; `length` is the makespan."""

    orders: Orders
    model: cp_model.CpModel
    ticks_per_s: float
    horizon: int
    start: dict[int, cp_model.IntVar] = field(default_factory=dict)

    def down(self, seconds: float) -> int:
        return int(seconds * self.ticks_per_s)


def solve_window(
    orders: Orders,
    low_s: float,
    high_s: float,
    *,
    effort: float,
    floor_s: float = 0.0,
    seed: int = 0,
    proof: bool = False,
    heads: np.ndarray | None = None,
    tails: np.ndarray | None = None,
) -> WindowAnswer:
    """The best order of the actions that run between `low_s` and `high_s`.

    Args:
        effort: limit in deterministic seconds of CP-SAT.
        floor_s: known bound on the makespan.
        proof: the bound matters as much as the order.
        heads, tails: of each action, earliest start and least time after its end in any order, where they are known.
    """
    ranges = [_inside(orders, row, low_s, high_s) for row in orders.rows]
    free = [number for row, (low, high) in zip(orders.rows, ranges, strict=True) for number in row[low:high]]
    if len(free) < 2:
        return WindowAnswer(rows=None, bound_s=floor_s, actions=len(free), deterministic_s=0.0)
    ticks_per_s = _TICKS / orders.makespan_s
    made = _Model(orders, cp_model.CpModel(), ticks_per_s, horizon=_TICKS + len(free))
    for number in free:
        first = made.down(heads[number]) if heads is not None else 0
        last = made.horizon
        if tails is not None:
            last -= made.down(tails[number]) + made.down(orders.nodes.seconds[number])
        made.start[number] = made.model.new_int_var(first, max(first, last), "")
        made.model.add_hint(made.start[number], made.down(orders.start_s[number]))
    length = made.model.new_int_var(made.down(floor_s), made.horizon, "")
    for rank, (low, high) in enumerate(ranges):
        if low < high:
            _order_rank(made, rank, low, high, length)
            _limit_memory(made, rank, low, high)
    made.model.minimize(length)
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.catch_sigint_signal = False  # Ctrl-C is Python's
    parameters.num_workers, parameters.random_seed, parameters.max_deterministic_time = 1, seed, effort
    # A window is small and solved often: what only pays on large models is off. For a proof the bound is raised first:
    # b16, c16 and f16 of benchmarks/schedule_cases.py are then proved in half of the work or less.
    parameters.symmetry_level = parameters.linearization_level = 0
    parameters.cp_model_probing_level, parameters.use_objective_lb_search = int(proof), proof
    status = solver.solve(made.model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return WindowAnswer(
        rows=_sorted_rows(made, ranges, solver) if found else None,
        bound_s=max(floor_s, solver.best_objective_bound / ticks_per_s),
        actions=len(free),
        deterministic_s=solver.response_proto.deterministic_time,
    )


def _inside(orders: Orders, row: list[int], low_s: float, high_s: float) -> tuple[int, int]:
    """Places of a row whose actions end after `low_s` and start before `high_s`."""
    low = next((place for place, number in enumerate(row) if orders.end_s[number] > low_s), len(row))
    high = next((place for place in range(low, len(row)) if orders.start_s[row[place]] >= high_s), len(row))
    return low, high


def _order_rank(made: _Model, rank: int, low: int, high: int, length: cp_model.IntVar) -> None:
    """One action at a time; after their inputs; the makespan is at least end + tail of each."""
    orders, model, start = made.orders, made.model, made.start
    seconds, row = orders.nodes.seconds, orders.rows[rank]
    release_s = orders.end_s[row[low - 1]] if low else 0.0
    tail_s = orders.tail_s[row[high]] if high < len(row) else orders.nodes.delivery_s[rank]
    model.add_no_overlap(
        [model.new_fixed_size_interval_var(start[x], made.down(seconds[x]), "") for x in row[low:high]]
    )
    for number in row[low:high]:
        first_s, last_s = release_s, tail_s
        for other, lag_s in orders.nodes.before[number]:
            if other in start:
                model.add(start[number] >= start[other] + made.down(seconds[other] + lag_s))
            else:
                first_s = max(first_s, orders.end_s[other] + lag_s)
        for other, lag_s in orders.nodes.after[number]:
            if other not in start:
                last_s = max(last_s, orders.tail_s[other] + lag_s)
        model.add(start[number] >= made.down(first_s))
        model.add(length >= start[number] + made.down(seconds[number]) + made.down(last_s))


def _limit_memory(made: _Model, rank: int, low: int, high: int) -> None:
    """What a forward holds lies between its start and the end of what releases it; parts whose other end is outside the
    window reach to the window's end."""
    nodes, model, start = made.orders.nodes, made.model, made.start
    capacity = nodes.problem.capacity[rank]
    if capacity == float("inf"):
        return
    per_unit = Fraction(_TICKS) / Fraction(capacity * (1 + 1e-9)) if capacity > 0 else Fraction(0)
    row = made.orders.rows[rank]
    inside = set(row[low:high])
    intervals, demands = [], []
    always = Fraction(made.orders.held[rank][low - 1]) if low else Fraction(0)  # held by what came before
    for number in row[low:high]:
        action, change = nodes.actions[number], Fraction(nodes.memory[number])
        if change < 0:
            forward = nodes.number[Compute(action.stage, "F", action.microbatch)]
            end = start[number] + made.down(nodes.seconds[number])
            size = model.new_int_var(0, made.horizon, "")
            if forward in inside:
                intervals.append(model.new_interval_var(start[forward], size, end, ""))
            else:
                always += change
                intervals.append(model.new_interval_var(0, size, end, ""))
            demands.append(int(-change * per_unit))
        elif change > 0:
            kinds: tuple[ComputeKind, ...] = ("I", "W")
            releases = [nodes.number.get(Compute(action.stage, kind, action.microbatch)) for kind in kinds]
            left = change + sum(Fraction(nodes.memory[x]) for x in releases if x is not None and x in inside)
            if left > Fraction(1, 10**9) * change:
                size = model.new_int_var(0, 2 * made.horizon, "")
                intervals.append(model.new_interval_var(start[number], size, 2 * made.horizon, ""))
                demands.append(int(left * per_unit))
    if intervals:
        model.add_cumulative(intervals, demands, int(_TICKS - always * per_unit))


def _sorted_rows(made: _Model, ranges: list[tuple[int, int]], solver: cp_model.CpSolver) -> list[list[int]]:
    """Rows by the starts found; of equal starts those without duration first, then as before."""
    seconds = made.orders.nodes.seconds
    value = {number: solver.value(variable) for number, variable in made.start.items()}
    rows = []
    for row, (low, high) in zip(made.orders.rows, ranges, strict=True):
        place = {number: index for index, number in enumerate(row)}
        middle = sorted(row[low:high], key=lambda x: (value[x], seconds[x] > 0, place[x]))
        rows.append([*row[:low], *middle, *row[high:]])
    return rows
