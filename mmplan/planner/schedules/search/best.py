"""The best schedule of a problem that can be found with so much work, with a bound: families, rules, moves, windows,
proof.

Each method starts from what the ones before it found and none makes it worse: published families; evolution of list
scheduling; then rounds of tabu search and of windows of time solved by CP-SAT; on small programs CP-SAT at last tries
to close the gap. Work is counted (`effort.py`), so a problem, a seed and a limit give one result on every machine.
Everything ends as soon as the bound is reached.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from mmplan.errors import NoPlanFoundError
from mmplan.planner.schedule import Schedule
from mmplan.planner.schedules.evaluate import evaluate, fits
from mmplan.planner.schedules.families import FAMILIES
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem
from mmplan.planner.schedules.search.bound import Bound, lower_bound
from mmplan.planner.schedules.search.effort import REACHED, Effort
from mmplan.planner.schedules.search.evolution import evolve
from mmplan.planner.schedules.search.nodes import Nodes, build_nodes
from mmplan.planner.schedules.search.orders import Orders
from mmplan.planner.schedules.search.tabu import TabuSearch
from mmplan.planner.stopping import never

if TYPE_CHECKING:
    from mmplan.planner.schedules.search.windows import WindowAnswer

SEARCH_S = 5.0  # of work where nobody says
ISLANDS, GENERATIONS, ROUNDS, ITERATIONS = 2, 8, 30, 800
STARTS = 2  # orders of each island that tabu search goes on from in its first round
WINDOW_EFFORT = 0.2  # of a first window; it grows with the square of the width
PROVED_ACTIONS, PROOF_EFFORT, PROVED_ROUNDS = 600, 12.0, 2  # fewer rounds where CP-SAT can take over
LARGE = 4000  # actions above which evolution is left out and a round has fewer moves: each takes too long
FIRST_WINDOW, WIDER = 100, 1.3  # actions in a window, and how it grows


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleResult:
    """`gap` = (makespan_s - bound_s) / makespan_s; `method` is what found the schedule; `tried` every method in turn
    with the makespan after it, families that do not apply or do not fit with the reason."""

    schedule: Schedule
    makespan_s: float
    span_s: float
    bound_s: float
    gap: float
    method: str
    tried: tuple[tuple[str, float | str], ...]
    wall_s: float


def best_schedule(
    problem: ScheduleProblem,
    *,
    search_s: float = SEARCH_S,
    seed: int = 0,
    spans: bool = False,
    stop: Callable[[], bool] = never,
) -> ScheduleResult:
    """The best schedule found.

    Args:
        search_s: work that may be done, in the seconds of `effort.py`; the same work takes longer on slower machines.
        spans: compare by the longest span of a rank instead of the makespan (see `Evaluation`).
        stop: asked often; True ends with the best so far, which may then differ from run to run.

    Raises:
        NoPlanFoundError: no schedule within the memory of the ranks was found.
    """
    effort = Effort(search_s, stop)
    nodes = build_nodes(problem, spans=spans)
    state = _State(nodes, lower_bound(nodes), effort)
    _families(state)
    if state.rows is None or (not state.ended() and len(nodes.actions) <= LARGE):
        _rules(state, seed)
    if state.rows is None:
        raise NoPlanFoundError(
            f"no schedule of {len(problem.stages)} stages fits the memory of its {problem.ranks} ranks"
        )
    _rounds(state, seed)
    if _provable(state) and not state.ended():
        _prove(state, seed)
    schedule = nodes.schedule(state.rows)
    evaluation = evaluate(problem, schedule)
    value_s = evaluation.span_s if spans else evaluation.makespan_s
    bound_s = min(state.bound_s - nodes.offset_s, value_s)
    return ScheduleResult(
        schedule=schedule,
        makespan_s=evaluation.makespan_s,
        span_s=evaluation.span_s,
        bound_s=bound_s,
        gap=(value_s - bound_s) / value_s if value_s > 0 else 0.0,
        method=state.method,
        tried=tuple(state.tried),
        wall_s=effort.wall_s,
    )


class _State:
    """The best rows so far, other good ones to start from, and what was tried."""

    def __init__(self, nodes: Nodes, bound: Bound, effort: Effort) -> None:
        self.nodes, self.bound, self.bound_s = nodes, bound, bound.makespan_s
        self.effort = effort
        self.rows: list[list[int]] | None = None
        self.best_s = float("inf")
        self.fullest = float("inf")  # part of its memory that the fullest rank uses under the best rows
        self.method = ""
        self.tried: list[tuple[str, float | str]] = []
        self.starts: list[list[list[int]]] = []

    def offer(self, rows: list[list[int]], method: str) -> float:
        """Keep the rows if they are shorter, or as short in less memory; returns their length."""
        orders = Orders(self.nodes, rows)
        if not orders.evaluate():
            return float("inf")
        limits = zip(orders.held, self.nodes.problem.capacity, strict=True)
        fullest = max((max(held, default=0.0) / capacity for held, capacity in limits if capacity > 0), default=0.0)
        shorter = orders.makespan_s < self.best_s * (1 - 1e-12)
        if shorter or (orders.makespan_s <= self.best_s * (1 + 1e-12) and fullest < self.fullest * (1 - 1e-9)):
            self.best_s, self.rows, self.method = orders.makespan_s, orders.copied(), method
            self.fullest = fullest
        return orders.makespan_s

    def solve(
        self, orders: Orders, low_s: float, high_s: float, effort: float, seed: int, proof: bool = False
    ) -> "WindowAnswer":
        """A window with all that is known of its actions, with the work that is left."""
        from mmplan.planner.schedules.search.windows import solve_window  # OR-Tools takes half a second to load

        answer = solve_window(
            orders,
            low_s,
            high_s,
            effort=min(effort, self.effort.deterministic_s),
            floor_s=self.bound_s,
            seed=seed,
            proof=proof,
            heads=self.bound.heads,
            tails=self.bound.tails,
        )
        self.effort.spend_window(answer.actions, len(self.nodes.actions), answer.deterministic_s)
        return answer

    def ended(self) -> bool:
        return self.best_s <= self.bound_s * (1 + REACHED) or self.effort.ended()

    def note(self, method: str) -> None:
        self.tried.append((method, self.best_s - self.nodes.offset_s))


def _families(state: _State) -> None:
    """Every published family that applies and fits."""
    problem = state.nodes.problem
    state.effort.spend_families(len(state.nodes.actions))
    for name, build in FAMILIES.items():
        if state.effort.stop():
            return
        schedule = build(problem)
        if isinstance(schedule, NotApplicable):
            state.tried.append((name, schedule.reason))
        elif not fits(problem, schedule):
            state.tried.append((name, "it needs more memory than a rank has"))
        else:
            length_s = state.offer(state.nodes.orders(schedule), name)
            state.tried.append((name, length_s - state.nodes.offset_s))


def _rules(state: _State, seed: int) -> None:
    """Evolution on islands that know nothing of each other; the best of each are starts for what follows."""
    for island in range(ISLANDS):
        if state.ended() and state.rows is not None:
            break
        bred = evolve(
            state.nodes,
            generations=GENERATIONS,
            seed=seed + island,
            effort=state.effort,
            floor_s=state.bound_s,
        )
        state.starts += [list(rows) for rows in bred.orders[:STARTS]]
        for rows in bred.orders:
            state.offer(rows, "evolution of rules")
    state.note("evolution of rules")


def _rounds(state: _State, seed: int) -> None:
    """Tabu search and windows in turn: first from the best of several starts, then from the best.

    Windows that nothing is gained in get wider; they get no wider than everything.
    """
    random = Random(seed)
    seconds = state.nodes.seconds
    tabu = TabuSearch(state.nodes, random)
    width = float(FIRST_WINDOW)
    iterations = min(ITERATIONS, ITERATIONS * LARGE // len(seconds))
    assert state.rows is not None
    starts = [state.rows, *(rows for rows in state.starts if rows != state.rows)]
    for turn in range(PROVED_ROUNDS if _provable(state) else ROUNDS):
        for rows in starts if turn == 0 else [state.rows]:
            if state.ended():
                break
            rows = [list(row) for row in rows]
            found = tabu.run(rows, iterations=iterations, floor_s=state.bound_s, effort=state.effort)
            state.offer(found, "tabu search")
        before_s = state.best_s
        _windows(state, random, width)
        if state.best_s == before_s:
            width *= WIDER
        if state.ended() or width > len(seconds):
            break
    state.note("tabu search and windows")


def _windows(state: _State, random: Random, width: float) -> None:
    """Windows of about `width` actions that overlap by half, over the whole step, each solved to its optimum where the
    effort allows."""
    assert state.rows is not None
    orders = Orders(state.nodes, [list(row) for row in state.rows])
    orders.evaluate()
    length_s = orders.makespan_s * width / len(state.nodes.actions)
    low_s = -length_s * random.uniform(0.25, 0.75)
    effort = WINDOW_EFFORT * (width / FIRST_WINDOW) ** 2
    while low_s < orders.makespan_s - length_s / 4 and not state.ended():
        answer = state.solve(orders, low_s, low_s + length_s, effort, random.randrange(10**6))
        _take(state, orders, answer.rows, "windows by CP-SAT")
        low_s += length_s / 2


def _take(state: _State, orders: Orders, rows: list[list[int]] | None, method: str) -> None:
    """Rows of a solver become the present ones when, evaluated exactly, they fit and are not longer."""
    if rows is None:
        return
    old, old_s = orders.rows, orders.makespan_s
    if not orders.replace(rows):
        return
    capacity = state.nodes.problem.capacity
    over = any(max(held) > limit * (1 + 1e-9) for held, limit in zip(orders.held, capacity, strict=True) if held)
    if over or orders.makespan_s > old_s * (1 + 1e-12):
        orders.replace(old)
    else:
        state.offer(orders.copied(), method)


def _provable(state: _State) -> bool:
    """Whether CP-SAT has a chance on everything: with several stages on a rank it gains little."""
    problem = state.nodes.problem
    return len(state.nodes.actions) <= PROVED_ACTIONS and len(problem.stages) <= problem.ranks


def _prove(state: _State, seed: int) -> None:
    """CP-SAT on everything: a better order, a better bound, or the proof that there is none."""
    assert state.rows is not None
    orders = Orders(state.nodes, [list(row) for row in state.rows])
    orders.evaluate()
    answer = state.solve(orders, -1.0, float("inf"), PROOF_EFFORT, seed % 2**31, proof=True)
    _take(state, orders, answer.rows, "CP-SAT")
    state.bound_s = max(state.bound_s, min(answer.bound_s, state.best_s))
    state.note("CP-SAT")
