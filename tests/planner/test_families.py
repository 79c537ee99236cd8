"""Schedules as text, small enough to compare with the figures of the papers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmplan.planner.families import build_schedule
from mmplan.planner.schedule import Compute


def text(order: tuple[Compute, ...]) -> str:
    return " ".join(map(str, order))


def test_1f1b_on_a_chain_is_the_published_order() -> None:
    schedule = build_schedule("1f1b", 3, 4, depths=(3, 2, 1), has_backward=(True, True, True))
    assert [text(order) for order in schedule] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_gpipe_runs_all_forwards_first() -> None:
    schedule = build_schedule("gpipe", 2, 3, depths=(2, 1), has_backward=(True, True))
    assert [text(order) for order in schedule] == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_parallel_encoders_admit_the_same_number_of_microbatches() -> None:
    vision, audio, _, _ = build_schedule("1f1b", 4, 4, depths=(3, 3, 2, 1), has_backward=(True,) * 4)
    assert text(vision).replace("0F", "1F").replace("0B", "1B") == text(audio)


def test_a_frozen_stage_has_forwards_only() -> None:
    frozen, _ = build_schedule("1f1b", 2, 3, depths=(2, 1), has_backward=(False, True))
    assert text(frozen) == "0F0 0F1 0F2"


@given(
    name=st.sampled_from(["1f1b", "gpipe"]),
    microbatches=st.integers(1, 12),
    depths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    data=st.data(),
)
def test_every_schedule_is_complete_ordered_and_round_trips(
    name: str, microbatches: int, depths: list[int], data: st.DataObject
) -> None:
    backward = data.draw(st.lists(st.booleans(), min_size=len(depths), max_size=len(depths)))
    schedule = build_schedule(name, len(depths), microbatches, depths, backward)  # type: ignore[arg-type]
    for stage, order in enumerate(schedule):
        assert tuple(map(Compute.parse, text(order).split())) == order
        kinds = "FB" if backward[stage] else "F"
        assert sorted(order) == sorted(Compute(stage, k, i) for k in kinds for i in range(microbatches))  # type: ignore[arg-type]
        alive = peak = 0
        for position, compute in enumerate(order):
            if compute.kind == "B":
                assert Compute(stage, "F", compute.microbatch) in order[:position]
            alive += 1 if compute.kind == "F" else -1
            peak = max(peak, alive)
        if backward[stage]:
            assert peak == (min(microbatches, depths[stage]) if name == "1f1b" else microbatches)


def test_lengths_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="3 stages, 2 depths"):
        build_schedule("1f1b", 3, 4, depths=(2, 1), has_backward=(True,) * 3)
