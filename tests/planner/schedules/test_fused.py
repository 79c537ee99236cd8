"""GPipe, 1F1B and its eager form as text, small enough to compare with the figures of the papers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_toys import chain, dag, faults, text

from mmplan.planner.schedule import Schedule
from mmplan.planner.schedules.evaluate import evaluate, memory_peaks
from mmplan.planner.schedules.fused import eager_one_f_one_b, gpipe, one_f_one_b
from mmplan.planner.schedules.in_flight import in_flight
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem


def made(problem: ScheduleProblem, name: str = "1f1b") -> Schedule:
    schedule = {"1f1b": one_f_one_b, "gpipe": gpipe, "eager-1f1b": eager_one_f_one_b}[name](problem)
    assert not isinstance(schedule, NotApplicable)
    return schedule


def test_1f1b_on_a_chain_is_the_published_order() -> None:
    assert [text(order) for order in made(chain(3, 4))] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_gpipe_runs_all_forwards_first() -> None:
    orders = [text(order) for order in made(chain(2, 3), "gpipe")]
    assert orders == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_eager_1f1b_admits_twice_as_many_less_one() -> None:
    assert text(made(chain(2, 4), "eager-1f1b")[0]) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"


def test_parallel_encoders_admit_the_same_number_of_microbatches() -> None:
    vision, audio, _, _ = made(dag([(0, 2), (1, 2), (2, 3)], 4))
    assert text(vision).replace("0F", "1F").replace("0B", "1B") == text(audio)


def test_a_generator_behind_the_backbone_counts_like_further_stages() -> None:
    """Stage 1 feeds its own head (2) and a talker of two stages (3, 4): three stages on the longest path."""
    backbone = made(dag([(0, 1), (1, 2), (1, 3), (3, 4)], 6))[1]
    assert text(backbone).startswith("1F0 1F1 1F2 1B0")


def test_a_frozen_stage_has_forwards_only() -> None:
    assert text(made(dag([(0, 1)], 3, frozen=[0]))[0]) == "0F0 0F1 0F2"


def test_two_stages_on_one_rank_are_refused_in_one_sentence() -> None:
    answer = one_f_one_b(dag([(0, 1), (1, 2)], 3, places=[0, 1, 0]))
    assert answer == NotApplicable("rank 0 holds 2 stages, this schedule is for one")


@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_makespan_of_1f1b_is_the_closed_form(p: int, m: int) -> None:
    """(m + p - 1) (F + B) without hops: 3 seconds a microbatch and stage."""
    problem = chain(p, m)
    assert evaluate(problem, made(problem)).makespan_s == pytest.approx(3.0 * (m + p - 1))


@given(name=st.sampled_from(["1f1b", "gpipe", "eager-1f1b"]), m=st.integers(1, 12), p=st.integers(1, 6))
def test_every_order_is_complete_and_holds_what_the_rule_says(name: str, m: int, p: int) -> None:
    problem = chain(p, m)
    schedule = made(problem, name)
    assert faults(problem, schedule) == []
    for depth, peak in zip(problem.depths(), memory_peaks(problem, schedule), strict=True):
        if name in ("1f1b", "gpipe"):
            assert peak == 2 * in_flight(name, m, depth)  # type: ignore[arg-type]
        else:
            assert peak == 2 * min(m, 2 * depth - 1)
