"""What MFU means: model, padding and hardware FLOPs of a small language model and of padded audio, by hand."""

from dataclasses import replace

import pytest
from small_models import FROZEN, Model, fixed, language_model, scenario_of, vision_audio_model

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.utilisation import ModalityFlops, step_flops, utilisation
from mmplan.scenario.scenario import Scenario

TEXT = scenario_of(Model(name="m", modules=(language_model(),), edges=()))


def text_flops(scenario: Scenario, tp: int = 1) -> ModalityFlops:
    (only,) = step_flops(scenario, build_graph(scenario), tp)
    return only


def test_trained_products_count_three_times_and_attention_over_all_pairs() -> None:
    """Two blocks of q, o [64, 64], k, v [64, 32], up, gate, down [64, 128], and a head [64, 256]."""
    tokens = TEXT.data.text_tokens.values[0]
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 64 * 256
    attention = 2 * 4 * tokens**2 * 64
    expected = 3 * (2 * tokens * weights + attention) * TEXT.global_batch
    assert text_flops(TEXT).model_flops == pytest.approx(expected)
    assert text_flops(TEXT).padding_flops == 0.0


def test_recomputation_is_hardware_and_not_model_work() -> None:
    full = replace(TEXT, technique=replace(TEXT.technique, recompute="full"))
    assert text_flops(full).model_flops == text_flops(TEXT).model_flops
    assert text_flops(full).hardware_flops > 1.2 * text_flops(TEXT).hardware_flops


def test_stored_scores_are_computed_whole_and_fused_ones_by_half() -> None:
    stored = replace(TEXT, technique=replace(TEXT.technique, attention="math"))
    assert text_flops(stored).hardware_flops > text_flops(TEXT).hardware_flops


def test_a_frozen_model_asks_for_its_forward_alone() -> None:
    frozen = scenario_of(Model(name="m", modules=(language_model(training=FROZEN),), edges=()))
    assert text_flops(frozen).model_flops == pytest.approx(text_flops(TEXT).model_flops / 3)


def test_clips_padded_to_thirty_seconds_are_padding() -> None:
    """A clip of 10 s padded to 30 s has three times the tokens and nine times the pairs."""
    scenario = scenario_of(vision_audio_model())
    data = replace(scenario.data, audio_clips=fixed(1), audio_s=fixed(10))
    modules = tuple(
        module if module.audio is None else replace(module, audio=replace(module.audio, pad_s=30.0))
        for module in scenario.model.modules
    )
    scenario = replace(scenario, data=data, model=replace(scenario.model, modules=modules))
    found = {entry.modality: entry for entry in step_flops(scenario, build_graph(scenario), 1)}
    assert 2 * found["audio"].model_flops < found["audio"].padding_flops < 8 * found["audio"].model_flops


def test_utilisation_divides_by_devices_time_and_peak() -> None:
    """The toy device has 8 TFLOP/s in bf16."""
    found = utilisation(TEXT, build_graph(TEXT), layouts=1, devices=4, step_s=0.5)
    assert found is not None
    assert found.mfu == pytest.approx(text_flops(TEXT).model_flops / (0.5 * 4 * 8e12))
    assert found.hfu == pytest.approx(text_flops(TEXT).hardware_flops / (0.5 * 4 * 8e12))
