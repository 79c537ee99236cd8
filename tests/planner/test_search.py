from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from mmplan.errors import InfeasibleError, InputError, NoPlanFoundError
from mmplan.planner import coarse as coarse_module
from mmplan.planner import exploration as exploration_module
from mmplan.planner import rivals as rivals_module
from mmplan.planner.check import check_plan
from mmplan.planner.naive import naive_result
from mmplan.planner.plan import Plan, plan_document
from mmplan.planner.problem import build_problem
from mmplan.planner.result import Progress
from mmplan.planner.rivals import Candidate
from mmplan.planner.search import optimize
from mmplan.planner.space import Space, build_space, solve_configuration
from mmplan.planner.stage_solver import solve_cut
from mmplan.planner.upsets import enumerate_upsets
from mmplan.report.simulation import simulate_plan
from mmplan.scenario.cluster import Cluster
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"


def shipped(name: str) -> Scenario:
    return load_scenario(SCENARIOS / f"{name}.yaml")


@pytest.fixture(scope="module")
def tiny() -> Scenario:
    """The tiny scenario as a pipeline of 2 or 4 stages, one replica."""
    scenario = shipped("tiny")
    return replace(scenario, constraints=replace(scenario.constraints, pp=(2, 4), dp=(1,)))


@pytest.fixture(scope="module")
def four_stages() -> Scenario:
    """A real model whose first stages are short of memory when the pipeline is balanced."""
    scenario = shipped("llama-3.2-11b-vision")
    rules = replace(scenario.constraints, pp=(4,), dp=(1,), cp=(1,), recompute=("none",), spread=())
    return replace(scenario, constraints=rules)


def with_memory(scenario: Scenario, memory_bytes: int) -> Scenario:
    def smaller(cluster: Cluster) -> Cluster:
        devices = [replace(pool.device, memory_bytes=memory_bytes, reserved_bytes=0) for pool in cluster.pools]
        pools = tuple(replace(pool, device=device) for pool, device in zip(cluster.pools, devices, strict=True))
        return replace(cluster, pools=pools)

    rules = replace(scenario.constraints, memory_headroom=0.0)
    return replace(scenario, cluster=smaller(scenario.cluster), constraints=rules)


def peak_bytes(plan: Plan) -> int:
    return max(stage.memory_bytes for stage in plan.stages)


def test_with_no_gap_the_best_of_all_configurations_is_found() -> None:
    scenario = shipped("tiny")
    space = build_space(scenario)
    every = [
        solve_cut(build_problem(space.prices, space.groups, one), space.coarse.upsets) for one in space.configurations
    ]
    best_ns = min(result.objective_ns for result in every if result.objective_ns is not None)
    result = optimize(scenario, gap=0.0)
    # integers round down by 1 ns per layer and microbatch
    assert result.plan.certificate.objective_s == pytest.approx(best_ns * 1e-9, rel=1e-5)
    assert result.bound_s <= best_ns * 1e-9 + 1e-15


@pytest.mark.parametrize("name", ["vitl16-llama3-8b", "llama-3.2-11b-vision", "qwen2.5-vl-7b-lora"])
def test_plans_are_sound_and_proven_within_the_gap(name: str) -> None:
    result = optimize(shipped(name), gap=0.01)
    assert check_plan(result.plan) == ()
    assert result.status == "optimal"
    assert 0 <= result.gap <= 0.0101
    assert result.bound_s <= result.plan.certificate.objective_s
    assert result.proofs == ("dynamic program", "CP-SAT")
    counts = result.considered
    assert counts.enumerated == counts.out_of_memory + counts.bounded_away + counts.solved


def test_equal_calls_give_equal_plans(tiny: Scenario) -> None:
    def document() -> dict[str, object]:
        plan = optimize(tiny, seed=1).plan
        return plan_document(replace(plan, certificate=replace(plan.certificate, wall_s=0.0)))

    assert document() == document()


def test_the_optimum_is_never_slower_than_the_naive_plan(tiny: Scenario) -> None:
    naive = naive_result(tiny)
    assert check_plan(naive.plan) == ()
    assert naive.plan.certificate.status == "given"
    assert naive.plan.pp == 4
    assert optimize(tiny).plan.certificate.objective_s <= naive.plan.certificate.objective_s


def test_more_memory_never_slows_the_plan(four_stages: Scenario) -> None:
    roomy = optimize(with_memory(four_stages, 10**12), gap=0.0).plan
    times_s = []
    for share in (0.78, 0.9, 0.94, 1.0):
        plan = optimize(with_memory(four_stages, int(share * peak_bytes(roomy))), gap=0.0).plan
        assert all(stage.memory_bytes <= stage.capacity_bytes for stage in plan.stages)
        times_s.append(plan.certificate.objective_s)
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[-1] == pytest.approx(roomy.certificate.objective_s)
    assert times_s[0] > times_s[1] > times_s[2] > times_s[3]  # each limit bites


def test_a_slower_link_never_shortens_the_step(tiny: Scenario) -> None:
    def slowed(factor: float) -> float:
        pools = tuple(
            replace(pool, node_link=replace(pool.node_link, bytes_per_s=pool.node_link.bytes_per_s / factor))
            for pool in tiny.cluster.pools
        )
        changed = replace(tiny, cluster=replace(tiny.cluster, pools=pools))
        return optimize(changed, gap=0.0).plan.certificate.objective_s

    times_s = [slowed(factor) for factor in (1, 10, 100)]
    assert times_s == sorted(times_s)
    assert times_s[0] < times_s[-1]


def test_no_split_zones_are_kept_and_cost_time(tiny: Scenario) -> None:
    free = optimize(tiny, gap=0.0)
    first_of_later_stages = tuple(stage.layers[0] for stage in free.plan.stages[1:])
    zoned = replace(tiny, constraints=replace(tiny.constraints, no_split=first_of_later_stages))
    result = optimize(zoned, gap=0.0)
    assert check_plan(result.plan) == ()
    assert result.plan.certificate.objective_s > free.plan.certificate.objective_s
    stage_of = result.plan.stage_of_layer()
    graph = build_space(zoned).prices.graph
    for edge in graph.edges():
        if {edge.producer, edge.consumer} & set(first_of_later_stages):
            assert stage_of[edge.producer] == stage_of[edge.consumer]


def test_runner_ups_lose_by_the_sum_of_their_terms(tiny: Scenario) -> None:
    result = optimize(tiny)
    assert result.runner_ups
    for other in result.runner_ups:
        assert other.objective_s is not None
        more_s = other.repeat_more_s + other.fill_more_s + other.finish_more_s
        assert other.objective_s - result.plan.certificate.objective_s == pytest.approx(more_s)
        assert ("slower" in other.reason) == (more_s >= 0)


def test_among_equals_within_the_gap_the_fastest_in_simulation_is_kept(tiny: Scenario) -> None:
    """With a gap of 100 % every cut is an equal; the certificate still speaks of the closed form."""
    best, equal = optimize(tiny, gap=0.0), optimize(tiny, gap=0.999)
    step_s = simulate_plan(equal.plan).step_time_s
    assert step_s <= simulate_plan(best.plan).step_time_s
    assert equal.bound_s <= best.plan.certificate.objective_s <= equal.plan.certificate.objective_s


def test_the_leader_in_simulation_wins(tiny: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed form's best cut is told to be slow in simulation: another one within the gap takes its place."""
    tiny = replace(tiny, constraints=replace(tiny.constraints, vp=(1,)))
    best = optimize(tiny, gap=0.5).plan

    def simulated(space: Space, one: Candidate, search_s: float, deadline: object) -> float:
        return 2.0 if one.stages == tuple(stage.layers for stage in best.stages) else 1.0

    monkeypatch.setattr(rivals_module, "simulated_s", simulated)
    result = optimize(tiny, gap=0.5)
    assert [stage.layers for stage in result.plan.stages] != [stage.layers for stage in best.stages]
    assert result.plan.certificate.gap <= 0.5
    assert any("faster, within the gap" in other.reason for other in result.runner_ups)


def test_a_runner_up_that_does_not_fit_says_so(four_stages: Scenario) -> None:
    tight = with_memory(four_stages, int(0.76 * peak_bytes(optimize(four_stages).plan)))
    tight = replace(tight, constraints=replace(tight.constraints, pp=(3, 4)))
    reasons = {other.reason for other in optimize(tight).runner_ups if other.objective_s is None}
    assert reasons == {"no cut fits into memory"}


def test_a_zone_over_everything_leaves_one_piece(tiny: Scenario) -> None:
    layers = tuple(layer.id for layer in build_space(tiny).prices.graph.layers())
    scenario = replace(tiny, constraints=replace(tiny.constraints, no_split=layers))
    with pytest.raises(InfeasibleError, match=r"4 stages, but the model cannot be cut; constraints.no_split keeps"):
        optimize(scenario)


def test_out_of_time_without_a_plan_is_no_proof(tiny: Scenario) -> None:
    with pytest.raises(NoPlanFoundError, match=r"0 of \d+ configurations tried"):
        optimize(tiny, time_limit_s=0.0)


def test_stopping_early_keeps_the_best_plan_and_an_honest_bound() -> None:
    omni = shipped("qwen2.5-omni-7b")  # its first cut is not its best one: branches share memory as no bound foresees
    scenario = replace(omni, constraints=replace(omni.constraints, pp=(2, 4), microbatch=(1,)))
    full = optimize(scenario, gap=0.0)
    seen: list[Progress] = []
    early = optimize(scenario, gap=0.0, on_improvement=seen.append, stop=lambda: any(one.objective_s for one in seen))
    assert check_plan(early.plan) == ()
    assert early.considered.solved < full.considered.solved
    assert early.status == "feasible"
    assert early.bound_s <= full.plan.certificate.objective_s <= early.plan.certificate.objective_s
    assert seen[-1].objective_s == early.plan.certificate.objective_s


def test_what_the_limit_leaves_unread_is_part_of_the_bound(tiny: Scenario) -> None:
    """Rows split over tp or not are two searches; the second is not begun, and counts with its matrix products."""
    both = replace(tiny, constraints=replace(tiny.constraints, sequence_parallel=(True, False)))
    full = optimize(both, gap=0.0)
    seen: list[Progress] = []
    early = optimize(both, gap=0.0, on_improvement=seen.append, stop=lambda: any(one.objective_s for one in seen))
    assert (full.considered.unread, early.considered.unread) == (0, 1)
    assert check_plan(early.plan) == ()
    assert early.status == "feasible"
    assert 0.0 < early.bound_s <= full.plan.certificate.objective_s


def test_progress_is_told_before_the_first_configuration(tiny: Scenario) -> None:
    seen: list[Progress] = []
    optimize(tiny, on_improvement=seen.append)
    before = [one.doing for one in seen if one.enumerated == 0]
    assert before == ["reading model and data", "bounding 31 configurations"]
    assert seen[-1].enumerated == 31


def test_ctrl_c_keeps_the_best_plan(tiny: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count()

    def interrupted(*args: object, **kwargs: object) -> object:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return solve_configuration(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(exploration_module, "solve_configuration", interrupted)
    shared = replace(tiny, constraints=replace(tiny.constraints, modules=()))
    result = optimize(shared, gap=0.0)
    assert check_plan(result.plan) == ()
    assert result.considered.solved == 1


def test_ctrl_c_among_meshes_keeps_the_best_plan(tiny: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> object:
        raise KeyboardInterrupt

    whole = optimize(tiny, gap=0.0)
    monkeypatch.setattr(exploration_module, "solve_meshed", interrupted)
    result = optimize(tiny, gap=0.0)
    assert check_plan(result.plan) == ()
    assert result.bound_s <= whole.plan.certificate.objective_s <= result.plan.certificate.objective_s


def test_with_too_many_upsets_cpsat_takes_over(tiny: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = optimize(tiny, gap=0.0)
    monkeypatch.setattr(coarse_module, "enumerate_upsets", lambda n, pairs, _=0: enumerate_upsets(n, pairs, 30))
    assert not build_space(tiny).exact
    result = optimize(tiny, gap=0.0)
    assert result.proofs == ("CP-SAT",)
    assert result.plan.certificate.objective_s == pytest.approx(exact.plan.certificate.objective_s, rel=1e-6)
    assert result.status == "optimal"


def test_steps_and_memory_beyond_whole_numbers_are_refused_in_a_sentence(tiny: Scenario) -> None:
    """One token a millennium, or samples of 10^13 tokens, would wrap around in 64-bit integers."""
    pool = tiny.cluster.pools[0]
    slow = replace(pool.device, fp32_flops_per_s=1e-3, memory_bytes_per_s=1e-3)
    cluster = replace(tiny.cluster, pools=(replace(pool, device=slow),))
    with pytest.raises(InputError, match=r"a step of tiny could take [\d,]+ years: check"):
        optimize(replace(tiny, cluster=cluster))
    endless = replace(tiny.data, text_tokens=replace(tiny.data.text_tokens, values=(1e13, 1e13, 1e13)))
    fast = replace(pool.device, fp32_flops_per_s=1e30, memory_bytes_per_s=1e30)
    cluster = replace(tiny.cluster, pools=(replace(pool, device=fast),))
    with pytest.raises(InputError, match=r"tiny could keep [\d,]+ TiB in one stage: check"):
        optimize(replace(tiny, cluster=cluster, data=endless))
