"""Three independent methods on random small DAGs: dynamic program, CP-SAT and brute force over all partitions."""

from dataclasses import replace

import pytest
from brute_force import brute_force, encoding_problem, random_problem

from mmplan.planner.cut_problem import CutEdge, CutProblem, evaluate_cut
from mmplan.planner.stage_cpsat import cut_by_cpsat
from mmplan.planner.stage_dp import cut_by_dp
from mmplan.planner.stage_solver import solve_cut, value_ceiling
from mmplan.planner.stopping import Deadline
from mmplan.planner.upsets import Upsets, enumerate_upsets

SEEDS = range(200)


def upsets_of(problem: CutProblem) -> Upsets:
    upsets = enumerate_upsets(problem.groups, [(edge.producer, edge.consumer) for edge in problem.edges])
    assert upsets is not None
    return upsets


def chain(work: list[int], *, stages: int, microbatches: int, **changes: object) -> CutProblem:
    """Groups in a row, one byte of state each, plenty of memory, no lag."""
    groups = len(work)
    problem = CutProblem(
        work_ns=tuple(work),
        state_bytes=(1,) * groups,
        kept_bytes=(0,) * groups,
        finish_ns=(0,) * groups,
        trainable=(True,) * groups,
        edges=tuple(CutEdge(producer=g, consumer=g + 1, lag_ns=0) for g in range(groups - 1)),
        finish_fixed_ns=0,
        capacity_bytes=100,
        stages=stages,
        microbatches=microbatches,
        schedule="1f1b",
    )
    return replace(problem, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", SEEDS)
def test_dynamic_program_cpsat_and_brute_force_agree(seed: int) -> None:
    agree(random_problem(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_they_agree_where_some_groups_run_several_microbatches_at_once(seed: int) -> None:
    agree(encoding_problem(seed))


def agree(problem: CutProblem) -> None:
    best = brute_force(problem)
    by_dp = solve_cut(problem, upsets_of(problem))
    by_cpsat = cut_by_cpsat(problem, cutoff_ns=value_ceiling(problem))
    assert by_dp.objective_ns == best
    assert not by_dp.exhausted
    if best is not None and by_cpsat.exhausted:  # runs that are not alike at every level are relaxed
        assert len(problem.levels) > 1
        assert by_cpsat.bound_ns <= best
        assert by_cpsat.objective_ns is None or best <= by_cpsat.objective_ns
        return
    assert by_cpsat.objective_ns == best
    if best is not None:
        assert by_dp.bound_ns == by_cpsat.bound_ns == best
        assert cut_by_cpsat(problem, cutoff_ns=best).stage_of is None


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_cutoff_below_every_floor_is_answered_without_a_search(microbatches: int) -> None:
    problem = chain([5, 5], stages=1, microbatches=microbatches)
    least = microbatches * 10
    for cutoff_ns in (1, least - 1, least):
        assert cut_by_cpsat(problem, cutoff_ns=cutoff_ns).stage_of is None
        assert solve_cut(problem, upsets_of(problem), cutoff_ns=cutoff_ns).stage_of is None
    assert cut_by_cpsat(problem, cutoff_ns=least + 1).objective_ns == least


def test_the_random_problems_cover_what_they_should() -> None:
    problems = [random_problem(seed) for seed in SEEDS]
    values = [brute_force(problem) for problem in problems]
    roomy = [brute_force(replace(problem, capacity_bytes=10**6)) for problem in problems]
    fits = [value is not None for value in values]
    assert sum(fits) > 120
    assert len(fits) - sum(fits) > 10
    assert sum(a is not None and a != b for a, b in zip(values, roomy, strict=True)) > 15  # memory binds
    sinks = [len({e.producer for e in problem.edges}) < problem.groups - 1 for problem in problems]
    assert sum(sinks) > 20
    assert {problem.schedule for problem in problems} == {"1f1b", "gpipe"}


@pytest.mark.parametrize("seed", range(60))
def test_a_cutoff_a_tolerance_or_a_spent_budget_never_make_the_bound_lie(seed: int) -> None:
    problem, upsets = random_problem(seed), upsets_of(random_problem(seed))
    best = brute_force(problem)
    if best is None:
        return
    at_best = solve_cut(problem, upsets, cutoff_ns=best)
    assert (at_best.stage_of, at_best.bound_ns) == (None, best)
    loose = solve_cut(problem, upsets, tolerance=0.1)
    assert loose.objective_ns is not None
    assert loose.bound_ns <= best <= loose.objective_ns <= loose.bound_ns / 0.9 + 1
    narrow = cut_by_dp(problem, upsets, cutoff_ns=value_ceiling(problem), width=1)
    assert narrow.bound_ns <= best
    assert narrow.exhausted == (narrow.objective_ns is None or narrow.bound_ns < narrow.objective_ns)
    spent = cut_by_dp(problem, upsets, cutoff_ns=value_ceiling(problem), max_rows=0)
    assert spent.exhausted == (problem.stages > 1)
    assert spent.bound_ns <= best


@pytest.mark.parametrize("seed", range(40))
def test_an_answer_is_worth_what_it_says(seed: int) -> None:
    problem = random_problem(seed)
    result = solve_cut(problem, upsets_of(problem))
    if result.stage_of is None:
        return
    value = evaluate_cut(problem, result.stage_of)
    assert value.objective_ns == result.objective_ns
    assert max(value.stage_memory_bytes) <= problem.capacity_bytes


def test_four_equal_layers_in_two_stages_take_the_textbook_time() -> None:
    # J = (m - 1) * max T + sum T + lag = 3 * 20 + 40 + 5
    edges = tuple(CutEdge(producer=g, consumer=g + 1, lag_ns=5) for g in range(3))
    problem = chain([10, 10, 10, 10], stages=2, microbatches=4, edges=edges)
    result = solve_cut(problem, upsets_of(problem))
    assert (result.objective_ns, result.stage_of) == (105, (0, 0, 1, 1))


def test_encoders_beside_each_other_are_placed_in_parallel() -> None:
    # two encoders of 10 feed a head of 10; three stages: J = (m - 1) * 10 + 10 + 10, a chain would need + 30
    edges = (CutEdge(producer=0, consumer=2, lag_ns=0), CutEdge(producer=1, consumer=2, lag_ns=0))
    problem = chain([10, 10, 10], stages=3, microbatches=4, edges=edges)
    assert solve_cut(problem, upsets_of(problem)).objective_ns == 50


def test_early_stages_hold_more_microbatches_and_get_fewer_layers() -> None:
    # 1F1B: stage 0 of 2 keeps 2 microbatches; 3 layers there would keep 2 * 3 = 6 > 5 beside no state
    problem = chain([1] * 5, stages=2, microbatches=8, kept_bytes=(1,) * 5, state_bytes=(0,) * 5, capacity_bytes=4)
    result = solve_cut(problem, upsets_of(problem))
    assert result.stage_of == (0, 0, 1, 1, 1)


def test_gpipe_holds_every_microbatch_everywhere() -> None:
    changes = {"kept_bytes": (1,) * 4, "state_bytes": (0,) * 4, "capacity_bytes": 15}
    one = chain([1] * 4, stages=2, microbatches=8, **changes)
    assert solve_cut(one, upsets_of(one)).stage_of is not None
    other = replace(one, schedule="gpipe")
    assert solve_cut(other, upsets_of(other)).stage_of is None
    assert cut_by_cpsat(other, cutoff_ns=1000).stage_of is None


@pytest.mark.parametrize(
    ("changes", "cutoff_ns"),
    [
        ({"capacity_bytes": 1}, 1000),  # memory: two groups of one byte in some stage
        ({}, 3 * 20 + 30),  # load: 3 layers of 10 in 2 stages keep one stage busy for 20
        ({"edges": (CutEdge(producer=0, consumer=1, lag_ns=9), CutEdge(producer=1, consumer=2, lag_ns=9))}, 99),  # path
        ({"finish_ns": (4, 4, 4)}, 98),  # finish: two of the three groups update in one stage
        ({"stages": 4}, 1000),  # a stage would be empty
    ],
)
def test_each_constraint_alone_can_make_cpsat_say_no(changes: dict[str, object], cutoff_ns: int) -> None:
    problem = chain([10, 10, 10], stages=2, microbatches=4, finish_ns=(0, 0, 0))
    assert cut_by_cpsat(problem, cutoff_ns=1000).objective_ns == 90
    result = cut_by_cpsat(replace(problem, **changes), cutoff_ns=cutoff_ns)  # type: ignore[arg-type]
    assert (result.stage_of, result.exhausted) == (None, False)


def test_cpsat_repeats_itself() -> None:
    problem = random_problem(3)
    results = [cut_by_cpsat(problem, cutoff_ns=value_ceiling(problem)) for _ in range(3)]
    assert results[0] == results[1] == results[2]


def test_limits_end_every_solver_with_an_honest_answer() -> None:
    problem = two_encoders(stages=6, cross=True)
    best = solve_cut(problem, upsets_of(problem)).objective_ns
    assert best is not None
    by_clock = cut_by_cpsat(problem, cutoff_ns=best + 1, max_wall_s=0.0)
    by_stop = cut_by_dp(problem, upsets_of(problem), cutoff_ns=best + 1, stop=lambda: True)
    for result in (by_clock, by_stop):
        assert result.exhausted
        assert result.bound_ns <= best


def test_a_deadline_shrinks_and_never_grows() -> None:
    whole = Deadline(limit_s=100.0)
    assert 0.0 < whole.within(1.0).left_s <= 1.0
    assert whole.within(1000.0).left_s <= 100.0
    assert not whole.passed()
    assert Deadline(limit_s=0.0).passed()
    assert Deadline(limit_s=100.0, stop=lambda: True).within(5.0).passed()


def test_too_many_upsets_are_refused_not_enumerated() -> None:
    assert enumerate_upsets(40, [], limit=1000) is None


def test_a_cut_that_runs_backwards_is_refused() -> None:
    with pytest.raises(ValueError, match="leads back"):
        evaluate_cut(chain([1, 1], stages=2, microbatches=1), (1, 0))


def two_encoders(*, stages: int, cross: bool) -> CutProblem:
    """Seven vision and five audio layers beside each other into ten backbone layers; `cross`: vision feeds three."""
    edges = [(g, g + 1) for g in (*range(6), *range(7, 11), *range(12, 21))]
    edges += [(6, 14), (6, 17), (6, 20), (11, 12)] if cross else [(6, 12), (11, 12)]
    return CutProblem(
        work_ns=(7_000,) * 7 + (3_100,) * 5 + (20_000,) * 10,
        state_bytes=(10,) * 7 + (9,) * 5 + (30,) * 10,
        kept_bytes=(4,) * 7 + (2,) * 5 + (7,) * 10,
        finish_ns=(100,) * 12 + (900,) * 10,
        trainable=(True,) * 22,
        edges=tuple(CutEdge(producer=u, consumer=v, lag_ns=300 if v < 12 else 700) for u, v in sorted(edges)),
        finish_fixed_ns=50,
        capacity_bytes=190,
        stages=stages,
        microbatches=12,
        schedule="1f1b",
    )


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("stages", [3, 4, 6])
def test_both_methods_agree_where_brute_force_cannot_go(stages: int, cross: bool) -> None:
    problem = two_encoders(stages=stages, cross=cross)
    by_dp = solve_cut(problem, upsets_of(problem))
    ceiling_ns = value_ceiling(problem) if by_dp.objective_ns is None else by_dp.objective_ns + 1
    by_cpsat = cut_by_cpsat(problem, cutoff_ns=ceiling_ns)
    assert not by_cpsat.exhausted
    assert by_dp.objective_ns == by_cpsat.objective_ns
