"""The schedule search against brute force, against the families, and against itself."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from random import Random
from time import perf_counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_toys import chain, faults

from mmplan.errors import CheckError
from mmplan.planner.schedule import Compute, ComputeKind
from mmplan.planner.schedules.evaluate import evaluate, fits
from mmplan.planner.schedules.families import FAMILIES
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem, StageEdge, StageWork
from mmplan.planner.schedules.search import effort as effort_module
from mmplan.planner.schedules.search.best import best_schedule
from mmplan.planner.schedules.search.bound import lower_bound
from mmplan.planner.schedules.search.effort import Effort
from mmplan.planner.schedules.search.nodes import build_nodes
from mmplan.planner.schedules.search.orders import Orders
from mmplan.planner.schedules.search.tabu import TabuSearch

_SLACK = 1 + 1e-6  # CP-SAT proves in millionths of a makespan


@st.composite
def problems(draw: st.DrawFn, most: int = 3, most_microbatches: int = 3, shared: bool = False) -> ScheduleProblem:
    """Trees and chains of unequal stages; the first may be frozen, the last may train nothing; memory of m or less.

    Args:
        shared: stages may share a rank.
    """
    count, m = draw(st.integers(2, most)), draw(st.integers(1, most_microbatches))
    frozen, untrained = draw(st.booleans()), draw(st.booleans())
    joined = draw(st.booleans()) and count > 2  # the first two stages feed the third
    seconds = st.integers(1, 5)
    places = [draw(st.integers(0, count - 1)) for _ in range(count)] if shared else list(range(count))
    ranks = sorted(set(places))
    stages = []
    for index in range(count):
        forward, input_s, weight = (tuple(float(draw(seconds)) for _ in range(m)) for _ in range(3))
        backward = not (frozen and index == 0)
        trained = backward and not (untrained and index == count - 1)
        stages.append(
            StageWork(
                rank=ranks.index(places[index]),
                forward_s=forward,
                input_s=input_s if backward else (),
                weight_s=weight if trained else (),
                held=(2.0,) * m,
                released_by_input=draw(st.sampled_from([0.0, 0.5])),
            )
        )
    pairs = [(index, max(index + 1, 2) if joined else index + 1) for index in range(count - 1)]
    edges = tuple(
        StageEdge(source=a, target=b, forward_s=lag, backward_s=lag, carries_grad=stages[a].has_backward)
        for a, b in pairs
        for lag in [0.0 if stages[a].rank == stages[b].rank else float(draw(st.integers(0, 2)))]
    )
    least = count if shared else 1  # all stages of one microbatch fit on a rank
    capacity = tuple(2.0 * (least - 1 + draw(st.integers(1, 3))) for _ in ranks)
    return ScheduleProblem(stages=tuple(stages), edges=edges, microbatches=m, capacity=capacity)


def all_orders(stage: int, work: StageWork, m: int) -> Iterator[tuple[Compute, ...]]:
    """Every order of a stage in which F, I, W and microbatches follow each other."""
    kinds: list[ComputeKind] = ["F", *(["I"] if work.has_backward else []), *(["W"] if work.has_weight else [])]  # type: ignore[list-item]

    def grow(counts: tuple[int, ...], order: tuple[Compute, ...]) -> Iterator[tuple[Compute, ...]]:
        if len(order) == m * len(kinds):
            yield order
        for place, kind in enumerate(kinds):
            count = counts[place]
            if count < m and (place == 0 or counts[place - 1] > count):
                later = (*counts[:place], count + 1, *counts[place + 1 :])
                yield from grow(later, (*order, Compute(stage, kind, count)))

    return grow((0,) * len(kinds), ())


def brute_force_s(problem: ScheduleProblem) -> float:
    """Least makespan of all orders within memory, where every stage has its own rank."""
    rows = [all_orders(stage, work, problem.microbatches) for stage, work in enumerate(problem.stages)]
    best_s = float("inf")
    for orders in product(*rows):
        if fits(problem, orders):
            with suppress(CheckError):  # ranks that wait for each other
                best_s = min(best_s, evaluate(problem, orders).makespan_s)
    return best_s


@settings(deadline=None, max_examples=40)
@given(problem=st.one_of(problems(most=2, most_microbatches=3), problems(most=3, most_microbatches=2)))
def test_the_search_finds_and_proves_what_brute_force_finds(problem: ScheduleProblem) -> None:
    exact_s = brute_force_s(problem)
    assert lower_bound(build_nodes(problem)).makespan_s <= exact_s * _SLACK
    result = best_schedule(problem, search_s=0.5)
    assert fits(problem, result.schedule)
    assert result.bound_s <= exact_s * _SLACK
    assert result.makespan_s <= exact_s * _SLACK
    assert result.gap <= 1e-4


@settings(deadline=None, max_examples=30)
@given(problem=problems(most=5, most_microbatches=6, shared=True))
def test_the_search_is_never_worse_than_the_best_family(problem: ScheduleProblem) -> None:
    made = [schedule for build in FAMILIES.values() if not isinstance(schedule := build(problem), NotApplicable)]
    lengths = [evaluate(problem, schedule).makespan_s for schedule in made if fits(problem, schedule)]
    assume(lengths)
    result = best_schedule(problem, search_s=1e-6)  # no more than the families
    assert faults(problem, result.schedule) == []
    assert fits(problem, result.schedule)
    assert result.bound_s <= result.makespan_s == evaluate(problem, result.schedule).makespan_s
    assert result.makespan_s <= min(lengths) * (1 + 1e-9)


def test_the_clock_ends_only_what_takes_many_times_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    late_s = [0.0]
    monkeypatch.setattr(effort_module, "perf_counter", lambda: perf_counter() + late_s[0])
    effort = Effort(2.0)
    late_s[0] = 15.0
    effort.spend_move(1000)
    assert not effort.ended()
    late_s[0] = 21.0
    assert effort.ended()


def test_work_is_counted_so_a_slow_machine_finds_the_same() -> None:
    """Every question to `stop` takes some time in the second run."""
    problem = chain(4, 8, forward_s=1.3, weight_s=0.6, hop_s=0.3, capacity=6.0)
    asked = []

    def slow() -> bool:
        asked.append(sum(range(20_000)))
        return False

    first, second = best_schedule(problem, search_s=0.3), best_schedule(problem, search_s=0.3, stop=slow)
    assert asked and first.gap > 0.01  # the search ended because its work was spent
    assert first.tried == second.tried
    assert first.schedule == second.schedule
    assert first.bound_s == second.bound_s


def test_more_work_makes_no_schedule_longer() -> None:
    problem = chain(4, 8, forward_s=1.3, weight_s=0.6, hop_s=0.3, capacity=6.0)
    lengths = [best_schedule(problem, search_s=work_s).makespan_s for work_s in (0.01, 0.1, 0.4)]
    assert lengths == sorted(lengths, reverse=True)


def test_stop_ends_the_search_with_a_complete_schedule() -> None:
    """Asked for the third time, between two families."""
    problem = chain(3, 4, capacity=6.0)
    answers = iter([False, False, True])
    result = best_schedule(problem, stop=lambda: next(answers, True))
    assert faults(problem, result.schedule) == []


@settings(deadline=None, max_examples=40)
@given(problem=problems(most=5, most_microbatches=6, shared=True), seed=st.integers(0, 99))
def test_an_order_changed_in_one_stretch_has_the_times_of_a_fresh_evaluation(
    problem: ScheduleProblem, seed: int
) -> None:
    random = Random(seed)
    nodes = build_nodes(problem)
    orders = Orders(nodes, nodes.orders(best_schedule(problem, search_s=0.01).schedule))
    assert orders.evaluate()
    for _ in range(20):
        row = random.choice([rank for rank, row in enumerate(orders.rows) if len(row) > 1])
        low, high = sorted(random.sample(range(len(orders.rows[row])), 2))
        moved = [list(order) for order in orders.rows]
        moved[row][low : high + 1] = random.sample(moved[row][low : high + 1], high + 1 - low)
        fresh = Orders(nodes, moved)
        before, old = orders.times(), orders.rows
        orders.rows = [list(order) for order in moved]
        assert orders.evaluate_moved(row, low, high) == fresh.evaluate()
        if fresh.tail_s:
            assert (orders.start_s, orders.end_s, orders.tail_s) == (fresh.start_s, fresh.end_s, fresh.tail_s)
            assert orders.makespan_s == fresh.makespan_s
        else:
            orders.rows = old
            orders.restore(before)


def test_tabu_search_leaves_orders_that_wait_in_a_circle_or_exceed_memory() -> None:
    problem = chain(3, 6, forward_s=1.3, weight_s=0.6, hop_s=0.3, capacity=4.0)
    nodes = build_nodes(problem)
    first = nodes.orders(best_schedule(problem, search_s=0.01).schedule)
    found = TabuSearch(nodes, Random(0)).run(first, iterations=200, floor_s=0.0, effort=Effort(1.0))
    assert faults(problem, nodes.schedule(found)) == []
    assert fits(problem, nodes.schedule(found))
