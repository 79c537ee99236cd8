"""Several chunks of layers per pipeline rank as an axis of the search: closed form, bounds, cuts, plans."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from brute_force import chunk_cuts, chunk_value, random_problem
from pipeline_toys import fixed, scenario
from random_jobs import random_job

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.errors import InfeasibleError
from mmplan.planner import chunk_solver as solver_module
from mmplan.planner.check import check_plan
from mmplan.planner.chunk_cut import each_level, evaluate_chunks
from mmplan.planner.chunk_floors import may_be_below
from mmplan.planner.chunk_solver import solve_chunks
from mmplan.planner.configuration import CHUNKS
from mmplan.planner.configurations import list_configurations
from mmplan.planner.cut_problem import CutProblem
from mmplan.planner.pins import parse_pins
from mmplan.planner.plan import Plan, plan_document
from mmplan.planner.repeated import Limits
from mmplan.planner.rivals import candidate
from mmplan.planner.schedules.evaluate import evaluate, memory_peaks
from mmplan.planner.schedules.in_flight import held_by_chunks
from mmplan.planner.schedules.looped import interleaved
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem, StageEdge, StageWork
from mmplan.planner.search import optimize
from mmplan.planner.simulate import simulate
from mmplan.planner.space import build_space, solve_configuration
from mmplan.planner.stopping import Deadline
from mmplan.planner.why_not import why_not
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Constraints, Scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"


def pipeline(p: int, v: int, m: int, work_s: list[float], lag_s: float = 0.0, held: float = 1.0) -> ScheduleProblem:
    """A chain of chunks laid round p ranks; a third of the work is forward."""
    stages = tuple(
        StageWork(rank=c % p, forward_s=(t / 3,) * m, input_s=(2 * t / 3,) * m, held=(held * (1 + c),) * m)
        for c, t in enumerate(work_s)
    )
    edges = [StageEdge(source=c, target=c + 1, forward_s=lag_s, backward_s=lag_s) for c in range(p * v - 1)]
    return ScheduleProblem(stages=stages, edges=tuple(edges), microbatches=m, capacity=(float("inf"),) * p)


def makespan_s(problem: ScheduleProblem) -> float:
    schedule = interleaved(problem)
    assert not isinstance(schedule, NotApplicable)
    return evaluate(problem, schedule).makespan_s


SHAPES = [(2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 4, 32), (3, 2, 3)]


@pytest.mark.parametrize(("p", "v", "m"), SHAPES)
@pytest.mark.parametrize("lag_s", [0.0, 0.02])
def test_the_closed_form_of_equal_chunks_is_the_makespan(p: int, v: int, m: int, lag_s: float) -> None:
    found = makespan_s(pipeline(p, v, m, [1.0] * (p * v), lag_s))
    assert found == pytest.approx((v * m + p - 1) + 2 * lag_s * (p * v - 1))


@pytest.mark.parametrize(("p", "v", "m"), SHAPES)
def test_unequal_chunks_are_never_slower_than_all_as_long_as_the_busiest(p: int, v: int, m: int) -> None:
    random = np.random.default_rng(p * v * m)
    for _ in range(5):
        work_s = random.uniform(0.1, 2, p * v).tolist()
        assert makespan_s(pipeline(p, v, m, work_s)) <= (v * m + p - 1) * max(work_s) * (1 + 1e-12)


@pytest.mark.parametrize(("p", "v", "m"), SHAPES)
def test_the_moments_of_a_rank_hold_what_its_order_holds(p: int, v: int, m: int) -> None:
    problem = pipeline(p, v, m, [1.0] * (p * v))
    schedule = interleaved(problem)
    assert not isinstance(schedule, NotApplicable)
    for rank, peak in enumerate(memory_peaks(problem, schedule)):
        moments = held_by_chunks(p, v, m, rank)
        assert peak == max(sum(n * (1 + j * p + rank) for j, n in enumerate(moment)) for moment in moments)
        # what bounds build on: at some moment the d-th rank from the end holds min(p, 2 d - 1) of each chunk
        assert max(map(min, moments)) >= min(p, 2 * (p - rank) - 1)


def test_fewer_microbatches_than_ranks_are_not_interleaved() -> None:
    of = scenario(llm_layers=6, global_batch=12)
    rules = Constraints(tp=(1,), cp=(1,), dp=(1,), microbatch=(1, 3, 6), sharding=("none",), vp=CHUNKS)
    found = {(one.pp, one.vp, one.microbatches) for one in list_configurations(replace(of, constraints=rules), 8)}
    chunked = {key for key in found if key[1] > 1}
    assert chunked
    assert all(m % pp == 0 and pp > 1 and pp * v <= 8 for pp, v, m in chunked)
    assert {(2, 2, 2), (2, 3, 12), (4, 2, 4)} <= chunked
    assert not {key for key in chunked if key[0] == 3 and key[2] < 12}


def chunk_problem(seed: int) -> tuple[CutProblem, int]:
    """A random problem of two or three ranks with several chunks each."""
    random = np.random.default_rng(seed)
    problem = random_problem(seed)
    while problem.groups < 4:
        problem = random_problem(int(random.integers(10_000, 20_000)))
    p = 3 if problem.groups >= 6 and random.random() < 0.3 else 2
    v = int(random.integers(2, problem.groups // p + 1))
    kind_of = (problem.kind_of * p)[:p]
    sized = replace(problem, stages=p, microbatches=p * int(random.integers(1, 4)), schedule="1f1b", kind_of=kind_of)
    return sized.with_capacity(int(problem.capacity_bytes * random.uniform(0.8, 4))), v


def best_value(problem: CutProblem, chunks: int) -> int | None:
    values = (chunk_value(problem, cut) for cut in chunk_cuts(problem, chunks))
    return min((value for value in values if value is not None), default=None)


@pytest.mark.parametrize("seed", range(60))
def test_the_best_cut_into_chunks_is_that_of_all_cuts(seed: int) -> None:
    problem, chunks = chunk_problem(seed)
    best, found = best_value(problem, chunks), solve_chunks(problem, chunks)
    assert not found.exhausted
    assert found.objective_ns == best
    if best is not None:
        assert found.bound_ns == best
        assert solve_chunks(problem, chunks, cutoff_ns=best).stage_of is None
        assert solve_chunks(problem, chunks, cutoff_ns=best + 1).objective_ns == best


@pytest.mark.parametrize("seed", range(60))
def test_limits_prove_no_more_than_there_is(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of large problems: cuts it finds are sound, bounds valid, and proofs of absence right."""
    monkeypatch.setattr(solver_module, "MOST_CUTS", 0)
    problem, chunks = chunk_problem(seed)
    best, found = best_value(problem, chunks), solve_chunks(problem, chunks)
    if best is None:
        assert found.stage_of is None
        return
    assert found.bound_ns <= best
    if found.stage_of is not None:
        ends = [place for place in range(1, problem.groups + 1) if found.stage_of.count(place - 1)]
        ends = np.cumsum([found.stage_of.count(chunk) for chunk in range(len(ends))]).tolist()
        values = [evaluate_chunks(one, chunks, ends) for one in each_level(problem)]
        assert found.objective_ns in [value.objective_ns for value in values if value.fits]
        assert found.objective_ns is not None
        assert found.objective_ns >= best
    else:
        assert found.exhausted
    below = solve_chunks(problem, chunks, cutoff_ns=best)
    assert below.stage_of is None
    assert below.bound_ns <= best


@pytest.fixture(scope="module")
def tiny() -> Scenario:
    return load_scenario(SCENARIOS / "tiny.yaml")


def step_s(plan: Plan) -> float:
    return simulate(plan, build_graph(plan.scenario), AnalyticCostModel(plan.scenario)).step_time_s


def only(of: Scenario, **rules: object) -> Scenario:
    return replace(of, constraints=replace(of.constraints, **rules))  # type: ignore[arg-type]


def test_chunks_of_the_tiny_scenario_are_faster_in_simulation_and_slower_by_the_closed_form(tiny: Scenario) -> None:
    plan, one_each = optimize(only(tiny, vp=(4,))).plan, optimize(only(tiny, vp=(1,))).plan
    assert (plan.schedule, plan.vp, plan.placement[:4]) == ("interleaved", 4, (0, 1, 0, 1))
    assert check_plan(plan) == ()
    assert step_s(plan) < 0.9 * step_s(one_each)
    assert plan.certificate.objective_s > one_each.certificate.objective_s
    assert optimize(tiny).plan.vp == 1  # within the gap that was asked for
    assert step_s(plan) <= plan.certificate.objective_s


def test_with_no_gap_the_closed_form_alone_decides(tiny: Scenario) -> None:
    assert optimize(tiny, gap=0.0).plan.vp == 1


def test_constraints_name_chunks_and_schedules(tiny: Scenario) -> None:
    assert optimize(only(tiny, vp=(2,))).plan.vp == 2
    assert optimize(only(tiny, schedule=("1f1b",))).plan.vp == 1
    plan = optimize(only(tiny, schedule=("interleaved",))).plan
    assert plan.vp > 1
    assert plan.schedule == "interleaved"
    assert check_plan(plan) == ()


def test_chunks_are_searched_unasked_where_they_are_faster() -> None:
    """Eight equal blocks on four ranks, four microbatches: 7 works of a rank under 1F1B, 5.5 in two chunks per rank."""
    of = scenario(llm_layers=8, vision_layers=0, global_batch=4, devices=4)
    rules = Constraints(tp=(1,), cp=(1,), pp=(4,), dp=(1,), microbatch=(1,), sharding=("none",), memory_headroom=0.0)
    of = replace(of, constraints=rules)
    free, one_each = optimize(of), optimize(only(of, vp=(1,)))
    assert free.plan.vp > 1
    assert free.status == "optimal"
    assert check_plan(free.plan) == ()
    assert free.considered.in_chunks > 0 == one_each.considered.in_chunks
    assert free.plan.certificate.objective_s < 0.9 * one_each.bound_s
    assert free.bound_s <= optimize(of, gap=0.0).plan.certificate.objective_s
    assert optimize(only(of, schedule=("1f1b",))).plan.vp == 1


@pytest.mark.parametrize("seed", [0, 7, 12, 25])
def test_what_is_ruled_out_in_chunks_has_no_such_cut(seed: int) -> None:
    """Without a closer look; some are ruled out at half of their best step already."""
    space, deadline = build_space(random_job(seed)), Deadline(limit_s=60.0)
    rows, steps_ns = [], []
    for row in np.flatnonzero(space.configurations.vp > 1).tolist():
        answer = solve_configuration(space, row, cutoff_ns=None, tolerance=0.0, seed=0, deadline=deadline)
        if answer.stages is not None:
            rows.append(row)
            steps_ns.append(candidate(space, space.configurations[row], answer.stages).step_ns + 1)
    at, most_ns = np.array(rows), np.array(steps_ns)
    parts = space.prices, space.groups, space.configurations, space.first, at
    assert len(at)
    assert may_be_below(*parts, most_ns).all()
    assert not may_be_below(*parts, most_ns // 2).all()


def test_equal_calls_give_equal_chunks(tiny: Scenario) -> None:
    first, second = (optimize(tiny).plan for _ in range(2))
    assert plan_document(replace(first, certificate=second.certificate)) == plan_document(second)


def test_a_question_can_name_chunks(tiny: Scenario) -> None:
    winner = optimize(tiny, gap=0.0).plan
    answer = why_not(tiny, winner, parse_pins("vp=2", tiny), Limits(gap=0.01))
    assert answer.verdict == "slower"
    assert answer.plan is not None
    assert answer.plan.vp == 2
    more = [answer.repeat_more_s, answer.fill_more_s, answer.finish_more_s]
    assert sum(term for term in more if term is not None) == pytest.approx(
        answer.plan.certificate.objective_s - winner.certificate.objective_s
    )


def test_chunks_without_a_backward_are_interleaved() -> None:
    """Two frozen encoders beside each other in front: no chain, and chunks that have forwards only."""
    of = scenario(llm_layers=4, vision_layers=3, audio_layers=1, frozen_vision=True, global_batch=8, devices=2)
    rules = Constraints(tp=(1,), cp=(1,), pp=(2,), vp=(3,), microbatch=(1,), sharding=("none",), memory_headroom=0.0)
    of = replace(of, constraints=rules, data=replace(of.data, images=fixed(1)))
    plan = optimize(of).plan
    assert check_plan(plan) == ()
    kinds = {action[len(str(stage)) :][0] for stage in (0,) for action in plan.orders[0].split()}
    assert kinds == {"F", "B"}
    assert step_s(plan) > 0


def test_an_edited_objective_of_chunks_is_found(tiny: Scenario) -> None:
    plan = optimize(only(tiny, vp=(2,))).plan
    wrong = replace(plan, certificate=replace(plan.certificate, objective_s=0.9 * plan.certificate.objective_s))
    assert "objective" in [finding.rule for finding in check_plan(wrong)]


def test_stages_out_of_turn_have_no_bound(tiny: Scenario) -> None:
    plan = optimize(only(tiny, vp=(2,))).plan
    turned = replace(plan, placement=plan.placement[::-1], orders=plan.orders[::-1])
    assert any("no bound is known" in finding.message for finding in check_plan(turned))


def test_more_chunks_than_pieces_are_refused() -> None:
    of = scenario(llm_layers=2)
    rules = Constraints(tp=(1,), cp=(1,), pp=(4,), vp=(4,), microbatch=(1,))
    with pytest.raises(InfeasibleError, match=r"pp x vp pieces of the model, which has \d"):
        optimize(replace(of, constraints=rules))
    none = replace(rules, schedule=("1f1b",))
    with pytest.raises(InfeasibleError, match=r"allows 4 chunks per rank, and constraints\.schedule no interleaving"):
        optimize(replace(of, constraints=none))
    alone = replace(rules, pp=(1,), vp=(2,))
    with pytest.raises(InfeasibleError, match=r"allows 2 chunks per rank, and constraints\.pp one rank, which has one"):
        optimize(replace(of, constraints=alone))


def test_schedules_in_two_chunks_need_two_of_them(tiny: Scenario) -> None:
    with pytest.raises(InfeasibleError, match=r"allows v-half alone, in two chunks per rank, and constraints\.vp 1$"):
        optimize(only(tiny, vp=(1,), schedule=("v-half",)))
    plan = optimize(only(tiny, vp=(2,), schedule=("v-half",))).plan
    assert (plan.schedule, plan.vp, check_plan(plan)) == ("v-half", 2, ())
    assert optimize(only(tiny, vp=(1,), schedule=("v-half", "1f1b"))).plan.schedule == "1f1b"


@pytest.mark.parametrize("seed", [0, 7, 12])
def test_plans_of_random_jobs_in_chunks_pass_the_checker(seed: int) -> None:
    job = only(random_job(seed), vp=(2,), pp=(2,), no_split=(), zones=())
    try:
        plan = optimize(job, gap=0.0).plan
    except InfeasibleError:
        return
    assert check_plan(plan) == ()
