"""Which batches make ranks wait for each other: never under the plan's own rules, and where other runtimes say so."""

from dataclasses import replace

import pytest
from pipeline_toys import fixed, plan, scenario

from mmplan.planner.check_hangs import check_hangs
from mmplan.planner.plan import Plan
from mmplan.planner.presence import disagreement, optional_modalities, pattern_sample, patterns
from mmplan.scenario.scenario import Distribution, Sample, Scenario

ENCODERS = [
    ["vision.embed", "vision.0"],
    ["audio.embed", "audio.0", "audio_projector.0"],
    ["vision_projector.0", "llm.embed", "llm.0"],
    ["llm.1", "llm.head", "llm.loss"],
]
SOME = Distribution(values=(0.0, 1.0), weights=(0.25, 0.75))


def mixed(*, frozen_vision: bool = False, audio: bool = True, dp: int = 1) -> Plan:
    """Three of four samples have images, and audio where asked for."""
    toy = scenario(llm_layers=2, vision_layers=1, audio_layers=1, frozen_vision=frozen_vision, global_batch=8)
    data = replace(toy.data, images=SOME, audio_clips=SOME if audio else fixed(1))
    return plan(replace(toy, data=data), ENCODERS, dp=dp)


def messages(of: Plan, runtime: str) -> list[str]:
    return [finding.message for finding in check_hangs(of, runtime)]  # type: ignore[arg-type]


@pytest.mark.parametrize("dp", [1, 2])
def test_no_pattern_of_missing_modalities_makes_our_own_ranks_diverge(dp: int) -> None:
    assert messages(mixed(dp=dp), "mmplan") == []


@pytest.mark.parametrize("runtime", ["fsdp", "zero3"])
def test_a_rank_without_an_image_skips_the_gathers_of_the_vision_tower(runtime: str) -> None:
    audio, images = messages(mixed(), runtime)
    assert "rank 0 with images is at all-gather of vision.embed" in images
    assert "rank 1 without images at all-gather of llm.embed" in images
    assert "Fix: run vision and vision_projector on a dummy input on every rank" in images
    assert "rank 1 without audio at all-gather of vision.embed" in audio


def test_gradients_of_unequal_size_are_named_with_both_sizes() -> None:
    (images,) = messages(mixed(audio=False), "zero2")
    assert "rank 0 with images is at reduce of the gradients of audio, audio_projector, llm, vision" in images
    assert "rank 1 without images at reduce of the gradients of audio, audio_projector, llm (" in images


def test_a_frozen_encoder_is_gathered_and_makes_no_gradients() -> None:
    """Its trained projector still does, under ZeRO-2 the only difference."""
    (images,) = messages(mixed(frozen_vision=True, audio=False), "zero2")
    assert "audio, audio_projector, llm, vision_projector (" in images
    assert len(messages(mixed(frozen_vision=True, audio=False), "fsdp")) == 1


def test_data_that_always_has_everything_never_diverges() -> None:
    toy = scenario(llm_layers=2, vision_layers=1, audio_layers=1)
    for runtime in ("fsdp", "zero3", "zero2"):
        assert messages(plan(toy, ENCODERS), runtime) == []


def test_a_pipeline_of_fixed_receives_waits_for_the_tensor_of_a_text_only_microbatch() -> None:
    found = messages(mixed(audio=False), "megatron-pp")
    assert "microbatch 0 without images: rank 2 waits for vision.0>vision_projector.0 (256 bytes)" in found[0]
    assert "rank 0 never sends" in found[0]


def test_sends_before_receives_without_buffers_are_a_circle_in_1f1b_and_none_in_gpipe() -> None:
    chain = [["llm.embed", "llm.0"], ["llm.1", "llm.head", "llm.loss"]]
    toy = scenario(llm_layers=2, global_batch=8)
    (circle,) = messages(plan(toy, chain), "megatron-pp")
    assert "ranks wait in a circle: " in circle
    assert "0SEND1[llm.0>llm.1]@1 before" in circle
    assert messages(plan(toy, chain, schedule="gpipe"), "megatron-pp") == []


def test_text_of_several_lengths_does_not_match_receives_of_fixed_length() -> None:
    made = mixed(audio=False)
    text = Distribution(values=(16.0, 48.0), weights=(0.5, 0.5))
    varied = replace(made.scenario, data=replace(made.scenario.data, text_tokens=text))
    assert any("2 lengths from 16 to 48 tokens" in m for m in messages(replace(made, scenario=varied), "megatron-pp"))


def lacking(images: float, size: int) -> dict[str, float]:
    toy: Scenario = scenario(llm_layers=1, vision_layers=1)
    distribution = Distribution(values=(0.0, 1.0), weights=(images, 1 - images))
    data = replace(toy.data, images=distribution)
    return dict(optional_modalities(replace(toy, data=data), size))


def test_larger_microbatches_lack_a_modality_less_often() -> None:
    assert lacking(0.5, 1)["vision"] == pytest.approx(0.5, abs=0.05)
    assert lacking(0.5, 3)["vision"] == pytest.approx(0.125, abs=0.04)
    assert lacking(0.0, 1) == lacking(1.0, 1) == {}


def test_patterns_are_all_sets_of_modalities() -> None:
    assert len(patterns({"vision", "audio", "speech"})) == 8
    assert patterns({"vision"}) == (frozenset(), frozenset({"vision"}))


def test_a_pattern_sample_has_all_but_what_is_missing() -> None:
    rows = (Sample(text_tokens=5, images=((8, 8),)), Sample(text_tokens=9, audio_s=(0.1,)))
    data = scenario(llm_layers=1, vision_layers=1, manifest=rows).data
    assert pattern_sample(data, set()) == Sample(text_tokens=9, images=((8, 8),), audio_s=(0.1,))
    assert pattern_sample(data, {"vision"}) == Sample(text_tokens=9, audio_s=(0.1,))


def test_disagreement_of_two_ranks_is_twice_the_product() -> None:
    assert disagreement(0.25, 2, 1) == pytest.approx(2 * 0.25 * 0.75)
    assert disagreement(0.25, 1, 5) == pytest.approx(0.0)
