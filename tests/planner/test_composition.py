"""Samples into microbatches: complete, deterministic, better balanced; step times as the simulator has them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_toys import TokenPrices, plan, scenario

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.loads import sample_loads
from mmplan.planner.composition import COMPOSITIONS, SampleTimes, compose, imbalance, ramp, step_composition
from mmplan.planner.plan import Composition, Plan
from mmplan.planner.simulate import simulate
from mmplan.planner.step_loads import drawn_step_loads
from mmplan.planner.step_times import step_times
from mmplan.scenario.samples import microbatch_samples
from mmplan.scenario.scenario import Distribution

STAGES = [
    ["vision.embed", "vision.0", "vision_projector.0"],
    ["audio.embed", "audio.0", "audio_projector.0"],
    ["llm.embed", "llm.0"],
    ["llm.1", "llm.head", "llm.loss"],
]


def varied(*, dp: int = 1, microbatch_size: int = 2, batch: int = 32, frozen_vision: bool = False) -> Plan:
    toy = scenario(llm_layers=2, vision_layers=1, audio_layers=1, global_batch=batch, frozen_vision=frozen_vision)
    data = replace(
        toy.data,
        text_tokens=Distribution(values=(8.0, 40.0, 300.0), weights=(0.5, 0.3, 0.2)),
        images=Distribution(values=(0.0, 1.0, 8.0), weights=(0.5, 0.3, 0.2)),
        audio_clips=Distribution(values=(0.0, 1.0), weights=(0.5, 0.5)),
    )
    return plan(replace(toy, data=data), STAGES, dp=dp, microbatch_size=microbatch_size)


@settings(max_examples=40, deadline=None)
@given(
    dp=st.integers(1, 3),
    microbatches=st.integers(1, 12),
    size=st.integers(1, 4),
    seed=st.integers(0, 1000),
    composition=st.sampled_from(COMPOSITIONS),
)
def test_every_sample_is_in_one_microbatch_and_none_is_empty(
    dp: int, microbatches: int, size: int, seed: int, composition: Composition
) -> None:
    rng = np.random.default_rng(seed)
    count = dp * microbatches * size
    times = np.stack([rng.integers(0, 3, count) * 100.0, rng.integers(1, 1000, count).astype(float)], axis=1)
    positions = compose(times, dp, microbatches, composition)
    assert [len(row) for row in positions] == [microbatches] * dp
    assert all(group for row in positions for group in row)
    assert sorted(i for row in positions for group in row for i in group) == list(range(count))
    assert compose(times, dp, microbatches, composition) == positions


def test_in_order_is_how_samples_are_drawn() -> None:
    made = varied(dp=2)
    times = SampleTimes(made, build_graph(made.scenario), AnalyticCostModel(made.scenario))
    drawn = microbatch_samples(made.scenario, dp=2, microbatch_size=2, step=3)
    assert step_composition(made, 3, "in order", times).samples == drawn


def test_reordering_keeps_microbatches_and_puts_small_ones_first_and_last() -> None:
    times = np.array([[5.0], [1.0], [4.0], [2.0], [3.0], [6.0]])
    assert compose(times, 1, 6, "reorder") == (((1,), (4,), (0,), (5,), (2,), (3,)),)


def test_balancing_is_close_to_equal_in_both_modalities() -> None:
    """Two kinds of samples: all encoder and no text, or the other way round; each microbatch gets one of both."""
    times = np.array([[10.0, 0.0]] * 6 + [[0.0, 10.0]] * 6)
    positions = compose(times, 1, 3, "balance")
    totals = [times[list(group)].sum(axis=0).tolist() for group in positions[0]]
    assert totals == [[20.0, 20.0]] * 3


def test_exchanging_samples_mends_what_the_largest_first_rule_leaves() -> None:
    """Largest first puts 3 + 2 + 2 beside 3 + 2 (Graham's example); exchanging a 3 for a 2 makes both 6."""
    times = np.array([[3.0], [3.0], [2.0], [2.0], [2.0], [0.0]])
    totals = [times[list(group)].sum() for group in compose(times, 1, 2, "balance")[0]]
    assert totals == [6.0, 6.0]


def test_balancing_shrinks_the_largest_microbatch_of_random_data() -> None:
    made = varied(microbatch_size=16, batch=96, dp=2)  # three microbatches: targets are equal
    times = SampleTimes(made, build_graph(made.scenario), AnalyticCostModel(made.scenario))
    for step in range(4):
        in_order, balanced = (step_composition(made, step, kind, times) for kind in ("in order", "balance"))  # type: ignore[arg-type]
        largest = [
            max(times.by_stage(group).sum(axis=0).max() for row in one.samples for group in row)
            for one in (in_order, balanced)
        ]
        assert largest[1] < largest[0]
        ratio = imbalance(balanced, times)["text"]
        assert 1.0 <= ratio < 1.1


def test_targets_rise_and_fall_over_four_microbatches() -> None:
    assert ramp(16)[:5].tolist() == [0.5, 0.625, 0.75, 0.875, 1.0]
    assert (ramp(16) == ramp(16)[::-1]).all()
    assert ramp(3).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("frozen_vision", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_step_times_and_memory_are_exactly_those_of_the_simulator(dp: int, frozen_vision: bool, schedule: str) -> None:
    """Also where microbatches lack images and their tensors are neither sent nor waited for."""
    made = replace(varied(dp=dp, microbatch_size=1, frozen_vision=frozen_vision, batch=12), schedule=schedule)
    graph, costs = build_graph(made.scenario), TokenPrices(transfer=20.0, reduce=3.0, update=1.0)
    for found in step_times(made, graph, costs, steps=4, compositions=COMPOSITIONS):
        times, peaks = SampleTimes(made, graph, costs), []
        for step, seconds in enumerate(found.step_s):
            samples = step_composition(made, step, found.composition, times).samples
            loads = [[sample_loads(made.scenario, group) for group in row] for row in samples]
            prediction = simulate(made, graph, costs, loads)
            assert seconds == pytest.approx(prediction.step_time_s, rel=1e-12)
            peaks.append(max(rank.peak_memory_bytes for rank in prediction.ranks))
        assert found.peak_memory_bytes == max(peaks)


def test_a_plan_that_balances_draws_its_steps_so() -> None:
    made = varied(microbatch_size=4)
    balanced = replace(made, composition="balance")
    assert drawn_step_loads(balanced, 0) != drawn_step_loads(made, 0)
    assert drawn_step_loads(balanced, 0) == drawn_step_loads(balanced, 0)
    totals = [sum(load["llm"].tokens for row in drawn_step_loads(p, 0) for load in row) for p in (made, balanced)]
    assert totals[0] == totals[1]
