"""What every family owes: complete orders, a text and a CSV that come back, no order that never ends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_toys import chain, dag, faults, text

from mmplan.planner.schedule import Schedule
from mmplan.planner.schedules.evaluate import evaluate, memory_peaks
from mmplan.planner.schedules.families import FAMILIES
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem
from mmplan.planner.schedules.text import parse_schedule, parse_schedule_csv, schedule_csv, schedule_text
from mmplan.scenario.schedule_names import SCHEDULE_NAMES, ScheduleName

ONE_STAGE: tuple[ScheduleName, ...] = ("1f1b", "gpipe", "eager-1f1b", "depth-first", "zb-h1", "zb-h2", "zb-1p", "zb-2p")
LOOPED: tuple[ScheduleName, ...] = ("interleaved", "looped-bfs")
V_SHAPED: tuple[ScheduleName, ...] = ("zb-v", "v-half", "v-min", "dualpipe-v")


def made(name: ScheduleName, problem: ScheduleProblem) -> Schedule:
    schedule = FAMILIES[name](problem)
    assert not isinstance(schedule, NotApplicable), f"{name}: {schedule.reason}"
    return schedule


def problem_for(name: ScheduleName, p: int, m: int) -> ScheduleProblem:
    if name in LOOPED:
        return chain(p, m * p, chunks=2, hop_s=0.1)
    if name in V_SHAPED:
        return chain(p, m + 2 * p, chunks=2, v_shaped=True, hop_s=0.1)
    return chain(p, m, hop_s=0.1)


def test_every_name_but_the_search_has_a_family() -> None:
    assert set(FAMILIES) == set(SCHEDULE_NAMES) - {"optimized"}


@settings(deadline=None, max_examples=120)
@given(name=st.sampled_from([*ONE_STAGE, *LOOPED, *V_SHAPED]), p=st.integers(1, 5), m=st.integers(1, 9))
def test_orders_are_complete_and_end_and_come_back_from_text(name: ScheduleName, p: int, m: int) -> None:
    if name in V_SHAPED and p < 2:
        p = 2
    problem = problem_for(name, p, m)
    schedule = made(name, problem)
    assert faults(problem, schedule) == []
    assert evaluate(problem, schedule).makespan_s > 0
    assert parse_schedule(schedule_text(schedule)) == schedule
    assert parse_schedule_csv(schedule_csv(schedule)) == schedule


@pytest.mark.parametrize("name", ["encoders-ahead", "encoders-in-bubbles"])
def test_families_of_encoders_are_complete_and_come_back_from_text(name: ScheduleName) -> None:
    """Two encoders, one frozen, beside each other before a backbone that shares a rank with one of them."""
    problem = dag([(0, 2), (1, 2), (2, 3)], 5, places=[0, 1, 1, 2], frozen=[0], encoders=[0, 1])
    schedule = made(name, problem)
    assert faults(problem, schedule) == []
    assert parse_schedule(schedule_text(schedule)) == schedule
    assert parse_schedule_csv(schedule_csv(schedule)) == schedule


def test_interleaved_is_the_order_of_megatron() -> None:
    """p = 2, v = 2, m = 4: rank 1 warms up with 2 forwards, rank 0 with 4; then one of each in turn."""
    first, second = made("interleaved", chain(2, 4, chunks=2))
    assert text(first) == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    assert text(second) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"


def test_looped_bfs_passes_all_microbatches_through_a_chunk_first() -> None:
    assert text(made("looped-bfs", chain(2, 2, chunks=2))[0]) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"


def test_zb_h1_is_the_figure_of_the_paper() -> None:
    """Last of three ranks: each F and I at once, and W as soon as three activations would be passed."""
    assert text(made("zb-h1", chain(3, 4))[2]) == "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"


def test_families_of_chunks_say_why_they_do_not_apply() -> None:
    assert FAMILIES["interleaved"](chain(2, 4)) == NotApplicable(
        "it needs two or more chunks per rank, laid round the ranks"
    )
    refused = NotApplicable("5 microbatches are no multiple of the 2 ranks")
    assert FAMILIES["interleaved"](chain(2, 5, chunks=2)) == refused
    assert isinstance(FAMILIES["zb-v"](chain(2, 4, chunks=2)), NotApplicable)
    assert isinstance(FAMILIES["dualpipe-v"](chain(3, 4, chunks=2, v_shaped=True)), NotApplicable)
    frozen = dag([(0, 1), (1, 2)], 4, no_weight=[2])
    assert FAMILIES["zb-h1"](frozen) == NotApplicable("stage 2 has no weight gradients to move", 2)
    assert FAMILIES["encoders-ahead"](chain(2, 4)) == NotApplicable("no stage holds an encoder alone")


def test_zb_v_has_no_bubble_inside_when_f_i_and_w_are_equal() -> None:
    """Makespan of unit passes: 3 m of work and p - 1 units each to reach the last rank and to come back from there."""
    p, m = 4, 12
    evaluation = evaluate(chain(p, m, chunks=2, v_shaped=True), made("zb-v", chain(p, m, chunks=2, v_shaped=True)))
    busy_s = 3.0 * m
    assert evaluation.span_s - busy_s < 1.0  # less than one pass idle
    assert max(evaluation.peaks) == 2 * p  # of 1F1B


@pytest.mark.parametrize(("name", "part"), [("v-half", 0.5), ("v-min", 1 / 3)])
def test_v_families_hold_the_part_of_1f1b_that_they_are_named_after(name: ScheduleName, part: float) -> None:
    """Within two chunks of a microbatch: blocks are whole units (arXiv 2405.15362, table 1: p / 2 + 1, p / 3 + 1)."""
    for p in (4, 8):
        problem = chain(p, 3 * p, chunks=2, v_shaped=True)
        assert max(memory_peaks(problem, made(name, problem))) <= 2 * (part * p + 1.5)


def test_encoders_beside_each_other_run_at_the_same_time() -> None:
    """Two encoders feed a backbone: in 1F1B neither waits for the other."""
    problem = dag([(0, 2), (1, 2), (2, 3)], 4, encoders=[0, 1])
    evaluation = evaluate(problem, made("1f1b", problem))
    assert evaluation.start_s[0][0] == evaluation.start_s[1][0] == 0.0


def test_encoders_ahead_run_all_forwards_before_the_backbone_needs_them() -> None:
    problem = dag([(0, 1), (1, 2)], 5, encoders=[0])
    assert text(made("encoders-ahead", problem)[0]).startswith("0F0 0F1 0F2 0F3 0F4 0I0")


def test_encoder_work_fills_bubbles_of_the_ranks_that_hold_the_backbone() -> None:
    """Encoder stages 0 and 1 share ranks with the backbone's 2 and 3: the backbone goes first wherever it can."""
    problem = dag([(0, 1), (1, 2), (2, 3)], 8, places=[0, 1, 0, 1], encoders=[0, 1])
    schedule = made("encoders-in-bubbles", problem)
    assert faults(problem, schedule) == []
    load_s = problem.load_s(0)
    assert evaluate(problem, schedule).makespan_s < 1.25 * load_s


def test_depth_first_keeps_within_memory() -> None:
    problem = dag([(0, 1), (1, 2), (2, 3)], 8, capacity=8.0)
    assert max(memory_peaks(problem, made("depth-first", problem))) <= 8.0
