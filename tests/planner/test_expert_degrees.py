"""Expert degrees as an axis that constraints, recipes and questions can name."""

from dataclasses import replace

import pytest
from pipeline_toys import scenario
from random_jobs import with_experts

from mmplan.errors import InfeasibleError
from mmplan.planner.check import check_plan
from mmplan.planner.configurations import list_configurations
from mmplan.planner.pins import parse_pins
from mmplan.planner.plan import Plan, scenario_hash
from mmplan.planner.recipes import plan_recipe
from mmplan.planner.repeated import Limits
from mmplan.planner.search import optimize
from mmplan.planner.why_not import why_not
from mmplan.scenario.recipe import Recipe
from mmplan.scenario.scenario import Constraints, Scenario

RULES = Constraints(tp=(2,), pp=(1, 2), cp=(1,), microbatch=(1,), sharding=("none",), memory_headroom=0.0)


def job(**rules: tuple[int, ...]) -> Scenario:
    """Four experts in each of two blocks, tp 2 on eight devices."""
    return replace(with_experts(scenario(llm_layers=2)), constraints=replace(RULES, **rules))


def degrees(of: Scenario) -> set[tuple[int, int]]:
    return {(one.ep, one.etp) for one in list_configurations(of, 4)}


def best(of: Scenario) -> Plan:
    return optimize(of, gap=0.0).plan


def test_etp_is_free_without_a_constraint() -> None:
    assert degrees(job()) == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)}


def test_a_pinned_etp_counts_unspread_experts_as_split_over_tp() -> None:
    assert degrees(job(etp=(1,))) == {(2, 1), (4, 1)}
    assert degrees(job(etp=(2,))) == {(1, 1), (2, 2), (4, 2)}


@pytest.mark.parametrize("etp", [1, 2])
def test_plans_have_the_etp_that_is_allowed_and_are_never_faster_for_it(etp: int) -> None:
    plan, free = best(job(etp=(etp,))), best(job())
    assert plan.ranks_per_expert == etp
    assert check_plan(plan) == ()
    assert plan.certificate.objective_s >= free.certificate.objective_s


def test_an_etp_that_no_tp_gives_is_refused_with_those_that_are() -> None:
    with pytest.raises(InfeasibleError, match=r"constraints\.etp allows 3, and this scenario can have 1, 2"):
        optimize(job(etp=(3,)))


def test_a_model_without_experts_has_etp_1_whatever_tp_is() -> None:
    plain = replace(scenario(llm_layers=2), constraints=replace(RULES, etp=(1,)))
    assert best(plain).tp == 2
    assert check_plan(best(plain)) == ()


def test_the_checker_finds_an_etp_that_is_not_allowed() -> None:
    plan = best(job(etp=(2,), ep=(2,)))
    rules = replace(plan.scenario.constraints, etp=(1,))
    other = replace(plan.scenario, constraints=rules)
    edited = replace(plan, scenario=other, scenario_hash=scenario_hash(other))
    assert "etp is 2, constraints.etp allows 1" in [finding.message for finding in check_plan(edited)]


def test_a_question_can_name_etp() -> None:
    of = job(ep=(2,))
    winner = best(of)
    other = 3 - winner.ranks_per_expert
    answer = why_not(of, winner, parse_pins(f"etp={other}", of), Limits(gap=0.0))
    assert answer.verdict in ("slower", "within the gap")
    assert answer.plan is not None
    assert answer.plan.ranks_per_expert == other


def test_a_recipe_can_name_etp() -> None:
    made = plan_recipe(job(), Recipe(name="r", source="made up", tp=2, ep=2, etp=2, pp=1, dp=4))
    assert made.plan is not None
    assert (made.plan.ep, made.plan.etp) == (2, 2)
