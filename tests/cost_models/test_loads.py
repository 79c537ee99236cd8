"""Tokens and pairs that samples bring to each module."""

from dataclasses import replace

import pytest
from small_models import FROZEN, LLM, VIT, edge, language_model, projector, scenario_of, vision, vision_audio_model

from mmplan.cost_models.loads import audio_frames, image_tokens, mean_loads, sample_loads, sequence_lengths
from mmplan.scenario.scenario import AudioInput, Model, ModelModule, Sample, VisionInput, Vocabulary

SAMPLES = (Sample(text_tokens=10, images=((8, 8), (8, 8)), audio_s=(0.05,)), Sample(text_tokens=4))


def test_image_of_8x8_with_patch_2_and_class_token_is_17_tokens_and_hands_on_16() -> None:
    load = sample_loads(scenario_of(vision_audio_model()), SAMPLES)["vision"]
    assert (load.sequences, load.tokens, load.outputs, load.pairs) == (2, 34, 32, 2 * 17**2)
    assert load.input_elements == 2 * 16 * 3 * 2**2


def test_clip_of_50_ms_is_6_frames_3_tokens_and_pools_to_1() -> None:
    load = sample_loads(scenario_of(vision_audio_model()), SAMPLES)["audio"]
    assert (load.input_elements, load.tokens, load.outputs, load.pairs) == (6 * 8, 3, 1, 9)


def test_language_model_sequence_is_merged_tokens_plus_text() -> None:
    """Sample 1: 2 * 16 patches + 1 audio token + 10 text; sample 2: 4 text."""
    load = sample_loads(scenario_of(vision_audio_model()), SAMPLES)["llm"]
    assert (load.sequences, load.tokens, load.pairs) == (2, 43 + 4, 43**2 + 4**2)
    assert (load.input_elements, load.targets) == (14, 9 + 3)


def test_mean_load_is_the_mean_of_exact_sample_loads() -> None:
    """Pairs are averaged, not squared after averaging: (43^2 + 4^2) / 2 per sample."""
    loads = mean_loads(scenario_of(vision_audio_model(), samples=SAMPLES), 4)
    assert loads["llm"].pairs == 4 * (43**2 + 4**2) / 2
    assert loads["vision"].tokens == 4 * 34 / 2


def test_cross_attention_pairs_stay_within_a_sample() -> None:
    shape = replace(LLM, cross_layers=(1,))
    modules = (vision(FROZEN), projector("p"), language_model(shape))
    edges = (edge("vision", "p", "input"), edge("p", "llm", "cross_attention"))
    load = sample_loads(scenario_of(Model(name="m", modules=modules, edges=edges)), SAMPLES)["llm"]
    assert (load.tokens, load.context_tokens, load.context_pairs) == (14, 32, 10 * 32)


def test_windows_cover_each_sequence_with_a_shorter_last_one() -> None:
    """17 tokens in windows of 5: three of 5 and one of 2."""
    module = replace(vision(), transformer=replace(VIT, window_tokens=5))
    load = sample_loads(scenario_of(Model(name="m", modules=(module,), edges=())), SAMPLES)["vision"]
    assert load.window_pairs == 2 * (3 * 5**2 + 2**2)


@pytest.mark.parametrize(
    ("size", "merge", "tokens"), [((28, 28), 1, 4), ((28, 28), 4, 4), ((30, 70), 4, 2 * 4), ((1, 1), 4, 4)]
)
def test_native_images_round_to_whole_merge_squares(size: tuple[int, int], merge: int, tokens: int) -> None:
    assert image_tokens(VisionInput(patch=14), size, merge) == tokens


def test_clips_are_padded_and_have_an_even_number_of_frames() -> None:
    assert audio_frames(AudioInput(mel_bins=80), 3.0) == 3000
    own = AudioInput(mel_bins=80, pad_s=None)
    assert [audio_frames(own, seconds) for seconds in (1.0, 0.05, 0.001)] == [100, 6, 2]


def test_talker_reads_the_sequence_of_its_language_model_before_its_own_tokens() -> None:
    talker = ModelModule(
        name="talker", kind="language_model", modality="speech", transformer=LLM, vocabulary=Vocabulary(size=8)
    )
    model = Model(name="m", modules=(talker, language_model()), edges=(edge("llm", "talker", "hidden"),))
    sample = Sample(text_tokens=6, speech_tokens=5)
    assert sequence_lengths(model, sample) == {"llm": (6,), "talker": (11,)}
    load = sample_loads(scenario_of(model), (sample,))["talker"]
    assert (load.context_tokens, load.input_elements, load.targets) == (6, 5, 4)


def test_tiles_join_into_one_sequence_only_if_asked() -> None:
    tiled = replace(vision(), vision=VisionInput(patch=2, image_size=4, tiles=3, class_token=True))
    joint = replace(tiled, vision=VisionInput(patch=2, image_size=4, tiles=3, class_token=True, joint_tiles=True))
    sample = Sample(text_tokens=1, images=((9, 9),))
    assert sequence_lengths(Model(name="m", modules=(tiled,), edges=()), sample)["vision"] == (5, 5, 5)
    model = Model(name="m", modules=(joint,), edges=())
    assert sequence_lengths(model, sample)["vision"] == (15,)
    assert sample_loads(scenario_of(model), (sample,))["vision"].outputs == 12
