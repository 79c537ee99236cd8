"""The checker of placement, orders and the schedule's certificate finds each kind of fault by its own rule."""

from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.check_schedule import (
    check_orders,
    check_placement,
    check_schedule_certificate,
    held_microbatches,
)
from mmplan.planner.naive import naive_result
from mmplan.planner.plan import Plan, ScheduleCertificate
from mmplan.planner.schedules.reschedule import refuse_unusable, with_family
from mmplan.scenario.load import load_scenario

TINY = Path(__file__).parents[3] / "scenarios" / "tiny.yaml"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two chunks on each of four pipeline ranks."""
    plan = naive_result(load_scenario(TINY)).plan
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    return refuse_unusable(with_family(plan, "zb-v", graph, costs))


def found(plan: Plan) -> list[str]:
    graph = build_graph(plan.scenario)
    findings = [*check_placement(plan, graph), *check_orders(plan, graph), *check_schedule_certificate(plan)]
    return [f"{finding.rule}: {finding.message}" for finding in findings]


def test_a_plan_of_a_family_is_sound(plan: Plan) -> None:
    assert found(plan) == []


def test_a_stage_without_a_place_and_a_rank_without_a_stage_are_found(plan: Plan) -> None:
    graph = build_graph(plan.scenario)
    (short,) = check_placement(replace(plan, placement=plan.placement[:-1]), graph)
    assert "for 8 stages" in short.message
    moved = replace(plan, placement=(*(4 if row == 3 else row for row in plan.placement[:-1]), 0))
    assert [finding.message for finding in check_placement(moved, graph)] == ["pipeline rank 3 of 5 holds no stage"]


def test_missing_lines_and_foreign_actions_are_found(plan: Plan) -> None:
    assert found(replace(plan, orders=())) == [
        "orders: schedule zb-v on 4 pipeline ranks needs `orders`, the plan has none"
    ]
    assert "3 lines" in found(replace(plan, orders=plan.orders[:-1]))[0]
    assert "0X1" in found(replace(plan, orders=("0X1", *plan.orders[1:])))[0]
    for foreign in ("1F0", "9F0", f"0F{plan.microbatches}"):
        assert f"lists {foreign}" in found(replace(plan, orders=(foreign, *plan.orders[1:])))[0]


@pytest.mark.parametrize(
    ("makespan_s", "bound_s", "gap", "rule"),
    [(1.0, 0.9, 0.1, ""), (1.0, 1.1, -0.1, "schedule bound"), (1.0, 0.9, 0.05, "schedule gap"), (0.0, 0.0, 0.0, "")],
)
def test_a_certificate_that_contradicts_itself_is_found(
    plan: Plan, makespan_s: float, bound_s: float, gap: float, rule: str
) -> None:
    proof = ScheduleCertificate(makespan_s=makespan_s, bound_s=bound_s, gap=gap, method="tabu search")
    assert [line.split(":")[0] for line in found(replace(plan, schedule_certificate=proof))] == [rule] * bool(rule)


def test_microbatches_are_held_until_their_last_compute(plan: Plan) -> None:
    """F0 F1 of stage 0, F0 of stage 7 on top; I0 does not end what W0 still needs: 2 x 10 + 1 x 3 bytes."""
    made = replace(plan, orders=("0F0 0F1 7F0 7I0 7W0 0I0 0W0 0F2 0I1 0I2 0W1 0W2", *plan.orders[1:]))
    assert held_microbatches(made, 0, [10, 0, 0, 0, 0, 0, 0, 3]) == ({0: 2, 7: 1}, 23)


def test_a_schedule_that_whole_backwards_exclude_names_the_constraint() -> None:
    plan = naive_result(load_scenario(TINY)).plan
    again = replace(plan, stages=tuple(replace(stage, recompute="full") for stage in plan.stages))
    choice = with_family(again, "zb-h1", build_graph(plan.scenario), AnalyticCostModel(plan.scenario))
    assert choice.plan is None
    assert "set `constraints.recompute: [none]` and optimize again" in choice.reason
