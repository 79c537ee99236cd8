"""Samples are the same for every reader and follow their distributions."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmplan.scenario.load import load_scenario
from mmplan.scenario.samples import draw_samples, microbatch_samples, reference_samples
from mmplan.scenario.scenario import Distribution, Sample

TINY = load_scenario(Path(__file__).parents[2] / "scenarios" / "tiny.yaml")


@given(first=st.integers(0, 1000), count=st.integers(0, 20), skip=st.integers(0, 20))
def test_a_sample_does_not_depend_on_the_range_asked_for(first: int, count: int, skip: int) -> None:
    longer = draw_samples(TINY.data, 3, first, skip + count)
    assert draw_samples(TINY.data, 3, first + skip, count) == longer[skip:]


def test_another_seed_gives_other_samples() -> None:
    assert draw_samples(TINY.data, 0, 0, 20) != draw_samples(TINY.data, 1, 0, 20)


def test_samples_stay_the_same_over_versions() -> None:
    assert draw_samples(TINY.data, 0, 0, 3) == (
        Sample(text_tokens=48, images=((64, 64),), audio_s=()),
        Sample(text_tokens=80, images=(), audio_s=(0.5,)),
        Sample(text_tokens=64, images=((64, 64),), audio_s=(0.5,)),
    )


def test_means_follow_the_histogram() -> None:
    """tiny: images 0, 1, 2, 3 with weights 1 2 2 1, mean 1.5, variance 0.917; three standard errors of 2,048 draws."""
    samples = reference_samples(TINY.data)
    mean = sum(len(sample.images) for sample in samples) / len(samples)
    assert len(samples) == 2048
    assert abs(mean - 1.5) < 3 * (0.917 / 2048) ** 0.5


def test_a_weight_of_zero_is_never_drawn() -> None:
    images = Distribution(values=(0.0, 7.0, 9.0), weights=(0.0, 1.0, 0.0))
    data = replace(TINY.data, images=images)
    assert {len(sample.images) for sample in draw_samples(data, 0, 0, 200)} == {7}


def test_fixed_data_need_one_reference_sample() -> None:
    one = Distribution(values=(1.0,), weights=(1.0,))
    data = replace(TINY.data, text_tokens=one, images=one, audio_clips=one, audio_s=one)
    assert reference_samples(data) == (Sample(text_tokens=1, images=((64, 64),), audio_s=(1.0,)),)


def test_a_manifest_is_read_in_order_and_again() -> None:
    rows = tuple(Sample(text_tokens=tokens) for tokens in (5, 6, 7))
    data = replace(TINY.data, manifest=rows)
    assert [sample.text_tokens for sample in draw_samples(data, 0, 2, 5)] == [7, 5, 6, 7, 5]
    assert reference_samples(data) == rows


def test_microbatches_cut_the_step_replica_by_replica() -> None:
    """Global batch 16, 2 replicas, 4 samples a microbatch: sample k of [r][m] is number 16 * step + 8 r + 4 m + k."""
    step = microbatch_samples(TINY, dp=2, microbatch_size=4, step=3)
    flat = draw_samples(TINY.data, TINY.seed, 48, 16)
    assert [len(replica) for replica in step] == [2, 2]
    assert all(step[r][m][k] == flat[8 * r + 4 * m + k] for r in range(2) for m in range(2) for k in range(4))


def test_a_microbatch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="global batch 16 is not a multiple of 3 x 2"):
        microbatch_samples(TINY, dp=3, microbatch_size=2, step=0)
