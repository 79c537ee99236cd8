"""The plan's degrees in two chunks per rank: chosen where simulation prefers it, with a bound of every schedule."""

from dataclasses import replace
from pathlib import Path

import pytest
from random_jobs import random_job

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.check import check_plan
from mmplan.planner.cut_plan import plan_from_cut
from mmplan.planner.in_chunks import worth_chunks
from mmplan.planner.plan import Plan, load_plan, save_plan
from mmplan.planner.quantise import NS_PER_S
from mmplan.planner.schedules.families import FAMILIES
from mmplan.planner.schedules.reschedule import WORTH, compare_families
from mmplan.planner.search import optimize
from mmplan.planner.simulate import simulate
from mmplan.planner.space import build_space, sketch_configuration
from mmplan.planner.stopping import Deadline, never
from mmplan.scenario.load import load_scenario

TINY = Path(__file__).parents[2] / "scenarios" / "tiny.yaml"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return optimize(load_scenario(TINY), schedule_search_s=1.0).plan


def test_no_schedule_beats_the_plan_at_its_own_degrees(plan: Plan) -> None:
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    proof = plan.chunk_certificate
    assert plan.vp == 2
    assert proof is not None
    assert proof.step_s == pytest.approx(simulate(plan, graph, costs).step_time_s, rel=1e-9)
    for choice in compare_families(plan, tuple(FAMILIES), graph, costs):
        if choice.plan is not None and choice.fits:
            assert proof.step_s * (1 - WORTH) <= simulate(choice.plan, graph, costs).step_time_s, choice.name


def test_the_certificate_speaks_of_the_cut_with_one_chunk(plan: Plan, tmp_path: Path) -> None:
    alone = optimize(load_scenario(TINY)).plan  # without a search for schedules
    assert plan.one_chunk.stages == alone.stages
    assert plan.certificate.objective_s == alone.certificate.objective_s
    assert plan.certificate.status == "optimal"
    assert check_plan(plan) == ()
    save_plan(plan, tmp_path / "chunks.plan.json")
    assert load_plan(tmp_path / "chunks.plan.json") == plan


@pytest.mark.parametrize(
    ("rule", "numbers"),
    [
        ("chunk step", {"step_s": 0.01, "bound_s": 0.0, "gap": 1.0}),
        ("chunk bound", {"step_s": 1.0, "bound_s": 1.5, "gap": -0.5}),
        ("chunk gap", {"gap": 0.0}),
    ],
)
def test_false_numbers_of_chunks_are_found(plan: Plan, rule: str, numbers: dict[str, float]) -> None:
    assert plan.chunk_certificate is not None
    false = replace(plan, chunk_certificate=replace(plan.chunk_certificate, **numbers))
    assert [finding.rule for finding in check_plan(false)] == [rule]


def test_false_numbers_of_the_cut_with_one_chunk_are_found(plan: Plan) -> None:
    proof = plan.chunk_certificate
    assert proof is not None
    first = replace(proof.stages[0], forward_s=2 * proof.stages[0].forward_s)
    false = replace(plan, chunk_certificate=replace(proof, stages=(first, *proof.stages[1:])))
    assert all(found.message.startswith("of the plan with one chunk per rank") for found in check_plan(false))
    assert check_plan(false)
    missing = replace(plan, chunk_certificate=replace(proof, stages=proof.stages[1:]))
    assert check_plan(missing)


def test_what_the_user_says_of_schedules_and_chunks_holds(plan: Plan) -> None:
    cut = plan.one_chunk
    assert worth_chunks(cut)
    for rules in ({"schedule": ("1f1b",)}, {"vp": (1,)}, {"modules": None}):
        constraints = replace(cut.scenario.constraints, **rules)  # type: ignore[arg-type]
        assert not worth_chunks(replace(cut, scenario=replace(cut.scenario, constraints=constraints))), rules


@pytest.mark.parametrize("seed", [5, 12, 14])
def test_no_schedule_is_faster_than_the_bound_of_any(seed: int) -> None:
    """Configurations with one to six chunks per rank, each cut under every schedule that applies, memory set aside."""
    job = random_job(seed)
    space, deadline = build_space(job), Deadline(limit_s=60.0, stop=never)
    graph, costs, tried = space.prices.graph, space.prices.costs, 0
    floors_ns = space.first.any_order_ns
    for index, configuration in list(enumerate(space.configurations))[::3]:
        answer = sketch_configuration(space, index, deadline)
        if answer.stages is None or configuration.batch_factor > 1:
            continue
        cut = plan_from_cut(space.prices, configuration, answer.stages, bound_s=0.0, status="feasible", wall_s=0.0)
        made = [cut] if configuration.vp > 1 else [c.plan for c in compare_families(cut, tuple(FAMILIES), graph, costs)]
        for one in made:
            if one is not None:
                assert simulate(one, graph, costs).step_time_s * NS_PER_S >= floors_ns[index], (
                    configuration,
                    one.schedule,
                )
                tried += 1
    assert tried
