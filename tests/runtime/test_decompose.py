"""The difference of a run and its prediction, on runs whose cause is known because they are made up."""

import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import changed, priced, run_that_took
from tiny_plans import FOUR_STAGES, TWO_STAGES, hand_plan, tiny_scenario

from mmplan.planner.plan import Plan
from mmplan.report.schedules import under_schedule
from mmplan.runtime.decompose import Decomposition, decompose
from mmplan.runtime.validate import Validation, validate

SCENARIO = replace(tiny_scenario(), global_batch=8)
PLANS = {
    "vision + audio + llm": hand_plan(SCENARIO, FOUR_STAGES),
    "two replicas": hand_plan(SCENARIO, TWO_STAGES, dp=2),
    "gpipe": hand_plan(SCENARIO, TWO_STAGES, schedule="gpipe"),
    "input and weight gradients": under_schedule(hand_plan(SCENARIO, TWO_STAGES), "zb-h1"),
}
COMPUTES = "FBIW"


def parts(found: Decomposition) -> list[float]:
    return [found.compute_s, found.bubble_s, found.communication_s, found.other_s]


@pytest.mark.parametrize("name", PLANS)
def test_a_run_as_predicted_has_no_difference_to_explain(name: str) -> None:
    program, durations = priced(PLANS[name])
    found = decompose(program, durations, run_that_took(PLANS[name], program, durations))
    assert parts(found) == pytest.approx([0.0] * 4, abs=1e-12)


@pytest.mark.parametrize("name", PLANS)
def test_computes_that_are_all_a_fifth_slower_are_compute(name: str) -> None:
    program, durations = priced(PLANS[name])
    slow = changed(program, durations, lambda rank, action, s: 1.2 * s if action.kind in COMPUTES else s)
    run = run_that_took(PLANS[name], program, slow)
    found = decompose(program, durations, run)
    assert found.compute_s == pytest.approx(run.step_time_s - found.planned_s)
    assert parts(found)[1:] == pytest.approx([0.0] * 3, abs=1e-12)


@pytest.mark.parametrize("name", PLANS)
def test_slow_links_are_communication(name: str) -> None:
    program, durations = priced(PLANS[name])
    slow = changed(program, durations, lambda rank, action, s: 20 * s if action.kind == "SEND" else s)
    run = run_that_took(PLANS[name], program, slow)
    found = decompose(program, durations, run)
    assert found.communication_s == pytest.approx(run.step_time_s - found.planned_s, rel=1e-6)
    assert found.communication_s > 0.01 * found.planned_s
    assert (found.compute_s, found.bubble_s) == pytest.approx((0.0, 0.0), abs=1e-12)


def test_a_slow_reduction_is_communication() -> None:
    plan = PLANS["two replicas"]
    program, durations = priced(plan)
    slow = changed(program, durations, lambda rank, action, s: 3 * s if action.kind == "REDUCE" else s)
    run = run_that_took(plan, program, slow)
    found = decompose(program, durations, run)
    assert found.communication_s == pytest.approx(run.step_time_s - found.planned_s)


def test_work_that_moves_from_one_rank_to_another_is_bubble() -> None:
    """As much computing in total, shared out otherwise: the busier rank holds up the others."""
    plan = PLANS["gpipe"]
    program, durations = priced(plan)
    busy_s = [
        sum(s for action, s in zip(rank.actions, row, strict=True) if action.kind in COMPUTES)
        for rank, row in zip(program.ranks, durations, strict=True)
    ]
    last = max(range(2), key=lambda rank: busy_s[rank])
    more = [1.3 if rank == last else 1 - 0.3 * busy_s[last] / busy_s[rank] for rank in range(2)]
    moved = changed(program, durations, lambda rank, action, s: more[rank] * s if action.kind in COMPUTES else s)
    run = run_that_took(plan, program, moved)
    found = decompose(program, durations, run)
    assert found.compute_s == pytest.approx(0.0, abs=1e-9)
    assert found.bubble_s == pytest.approx(run.step_time_s - found.planned_s)
    assert found.bubble_s > 0.1 * found.planned_s


def test_what_no_action_took_is_other() -> None:
    plan = PLANS["gpipe"]
    program, durations = priced(plan)
    found = decompose(program, durations, run_that_took(plan, program, durations, late_s=0.01))
    assert parts(found) == pytest.approx([0.0, 0.0, 0.0, 0.01], abs=1e-12)


def _validated(plan: Plan, seed: int, spread: float, late_s: float) -> tuple[Validation, float]:
    chosen, (program, durations) = random.Random(seed), priced(plan)
    other = changed(program, durations, lambda rank, action, s: s * chosen.uniform(1, 1 + spread))
    run = run_that_took(plan, program, other, late_s)
    return validate(plan, run), run.step_time_s


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(sorted(PLANS)),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    late_s=st.sampled_from([0.0, 0.02]),
)
def test_the_parts_sum_to_the_difference_whatever_the_run_did(
    name: str, seed: int, spread: float, late_s: float
) -> None:
    validation, measured_s = _validated(PLANS[name], seed, spread, late_s)
    found = validation.decomposition
    assert found.measured_s == measured_s
    assert sum(parts(found)) == pytest.approx(found.measured_s - found.planned_s, rel=1e-12, abs=1e-15)
    for rank in validation.parts:
        for part, step_s in ((rank.planned, found.planned_s), (rank.measured, measured_s)):
            spent = (part.compute_s, part.update_s, part.bubble_s, part.exposed_s, part.overhead_s)
            assert sum(spent) == pytest.approx(step_s, rel=1e-9)
            assert min(spent) > -1e-12 and -1e-12 <= part.reorderable_s <= part.bubble_s + 1e-12


def test_an_idle_rank_waits_for_others_then_for_the_link_then_for_its_host() -> None:
    """Two stages, one microbatch: the second computes when the first has sent, 3 ms late; links take 2 ms."""
    plan = replace(hand_plan(replace(SCENARIO, global_batch=1), TWO_STAGES), microbatches=1)
    program, durations = priced(plan)
    took = {"F": 0.01, "B": 0.02, "SEND": 0.002, "STEP": 0.001}
    run = run_that_took(plan, program, changed(program, durations, lambda rank, action, s: took.get(action.kind, 0.0)))
    validation = validate(plan, run)
    first, second = (rank.measured for rank in validation.parts)
    # 0F 10, link 2, 1F 10, 1B 20, link 2, 0B 20, STEP 1 = 65 ms
    assert run.step_time_s == pytest.approx(0.065)
    assert (second.bubble_s, second.exposed_s) == pytest.approx((0.010 + 0.022, 0.002))
    assert (first.bubble_s, first.exposed_s) == pytest.approx((0.032, 0.002))
    late = [
        (item, asked_s)
        if item.rank == 0
        else (replace(item, start_s=item.start_s + 0.003, end_s=item.end_s + 0.003), asked_s + 0.003)
        for item, asked_s in zip(run.timeline, run.asked_s, strict=True)
    ]
    late_run = replace(run, timeline=tuple(i for i, _ in late), asked_s=tuple(min(a, i.start_s) for i, a in late))
    second = validate(plan, late_run).parts[1].measured
    assert second.overhead_s == pytest.approx(0.0, abs=1e-9)  # it had asked at 3 ms: the tensor came late
    assert second.exposed_s == pytest.approx(0.005)
    unasked = replace(late_run, asked_s=tuple(i.start_s for i in late_run.timeline))
    second = validate(plan, unasked).parts[1].measured
    assert second.overhead_s == pytest.approx(0.005)  # nobody was ready for it


def test_another_order_would_have_had_something_to_run() -> None:
    """GPipe on the first of two stages is idle between its forwards and its backwards with nothing left to run; under
    1F1B a later forward stands behind the backward it waits for."""
    for schedule, some in (("gpipe", False), ("1f1b", True)):
        plan = hand_plan(SCENARIO, TWO_STAGES, schedule=schedule)
        program, durations = priced(plan)
        first = validate(plan, run_that_took(plan, program, durations)).parts[0].measured
        assert first.bubble_s > 0
        assert (first.reorderable_s > 0) == some


def test_prices_are_means_of_each_stage_and_kind() -> None:
    plan = PLANS["gpipe"]
    program, durations = priced(plan)
    slow = changed(program, durations, lambda rank, action, s: 1.5 * s if str(action).startswith("1B") else s)
    prices = {(p.stage, p.kind): p for p in validate(plan, run_that_took(plan, program, slow)).prices}
    assert prices[1, "B"].measured_s == pytest.approx(1.5 * prices[1, "B"].planned_s)
    assert prices[0, "B"].measured_s == pytest.approx(prices[0, "B"].planned_s)
    expected = fmean(s for a, s in zip(program.ranks[0].actions, durations[0], strict=True) if a.kind == "F")
    assert prices[0, "F"].planned_s == pytest.approx(expected) and prices[0, "F"].count == plan.microbatches
