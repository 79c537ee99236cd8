"""Linear attention and the block forms of further families: counts against torch, rows against transformers."""

from dataclasses import replace

import pytest
import torch
from layer_counts import compare
from layer_zoo import (
    CLIP,
    FROZEN,
    FULL,
    LLM,
    LORA_ALL,
    LORA_QV,
    graph_of,
    llava,
    microbatch_of,
    mllama,
    omni,
    scenario_of,
)
from torch import nn

from mmplan.runtime.layers import build_layer
from mmplan.scenario.attention_forms import GatedDelta
from mmplan.scenario.scenario import AudioInput, Model, Moe, Sample, Training, Transformer, Variant

DELTA = GatedDelta(key_heads=2, value_heads=4, key_dim=6, value_dim=8, conv=4)
LINEAR = replace(LLM, delta=DELTA)
SAMPLES = (
    Sample(text_tokens=3, images=((6, 6),)),
    Sample(text_tokens=70),
    Sample(text_tokens=125, images=((6, 6), (6, 6))),
)
FORMS: dict[str, Transformer] = {
    "linear attention": LINEAR,
    "linear and gated full attention": replace(
        LINEAR, variants=(Variant(layers=(1,), shape=replace(LLM, out_gate="column", qk_norm=True)),)
    ),
    "short convolution": replace(LLM, short_conv=3),
    "a gate for each head": replace(LLM, out_gate="head"),
    "shared experts behind a gate": replace(
        LLM, moe=Moe(experts=4, topk=2, expert_ffn=12, shared_ffn=8, shared_gate=True)
    ),
    "attention beside the MLP, norms without shift": replace(LLM, parallel=True, norm="layer", norm_bias=False),
    "norms behind the branches alone": replace(LLM, pre_norms=False, post_norms=True, qk_norm=True, qk_norm_whole=True),
    "keys as values": replace(LLM, keys_as_values=True, qk_norm=True),
    "stored numbers": replace(LLM, stored=7),
    "unlike blocks": replace(LLM, variants=(Variant(layers=(1,), shape=replace(LLM, heads=6, kv_heads=1, ffn=10)),)),
}


def with_shape(model: Model, name: str, shape: Transformer) -> Model:
    modules = (replace(m, transformer=shape, stored=3) if m.name == name else m for m in model.modules)
    return replace(model, modules=tuple(modules))


@pytest.mark.parametrize("llm", [FULL, FROZEN, LORA_QV, LORA_ALL], ids=["full", "frozen", "q and v", "all"])
@pytest.mark.parametrize("form", FORMS)
def test_counts_equal_torch_for_every_form_of_block(form: str, llm: Training) -> None:
    compare(with_shape(llava(FROZEN, FULL, llm), "llm", FORMS[form]), SAMPLES, "fp32")


@pytest.mark.parametrize("form", ["linear and gated full attention", "stored numbers"])
def test_counts_of_further_forms_hold_in_16_bit(form: str) -> None:
    compare(with_shape(llava(FULL, FULL, FULL), "llm", FORMS[form]), SAMPLES, "bf16")


@pytest.mark.parametrize("training", [FULL, FROZEN], ids=["full", "frozen"])
def test_a_block_may_attend_to_its_own_tokens_and_then_to_others(training: Training) -> None:
    shape = replace(LLM, layers=3, cross_layers=(1,), cross_width=24, cross_also=True, norm="layer")
    samples = (Sample(text_tokens=5, images=((4, 4),)), Sample(text_tokens=9, images=((4, 4), (4, 4))))
    compare(with_shape(mllama(FULL, FULL, training), "llm", shape), samples, "fp32")


def test_a_tower_holds_numbers_beside_its_products() -> None:
    compare(with_shape(llava(FULL, FULL, FULL), "vision", replace(CLIP, stored=5)), SAMPLES, "fp32")


def test_a_linear_block_equals_that_of_qwen3_next() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = modeling.Qwen3NextConfig(
        hidden_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        num_hidden_layers=1,
    )
    oracle = modeling.Qwen3NextGatedDeltaNet(config, 0)
    torch.manual_seed(0)
    for parameter in oracle.parameters():
        nn.init.normal_(parameter, std=0.4)
    scenario = scenario_of(with_shape(llava(FULL, FULL, FULL), "llm", replace(LINEAR, final_norm=False)))
    layer = graph_of(scenario.model).layer("llm.0")
    ours = build_layer(layer)
    wide = oracle.in_proj_qkvz.weight.view(2, 2 * 6 + 2 * 2 * 8, 24)  # key heads with their value heads
    q, k, v, z = wide.split((6, 6, 16, 16), dim=1)
    step, gate = oracle.in_proj_ba.weight.view(2, 4, 24).split(2, dim=1)
    named = {"q": q, "k": k, "v": v, "z": z, "gate_in": gate, "step_in": step}
    for name, weight in named.items():
        ours.get_parameter(f"parts.{name}.weight").data.copy_(weight.reshape(-1, 24))
    for name, weight in zip("qkv", oracle.conv1d.weight.squeeze(1).split((12, 12, 32)), strict=True):
        ours.get_parameter(f"parts.{name}_conv.weight").data.copy_(weight)
    ours.get_parameter("parts.rule.weight").data.copy_(torch.stack([oracle.A_log, oracle.dt_bias]))
    ours.get_parameter("parts.rule_norm.weight").data.copy_(oracle.norm.weight)
    ours.get_parameter("parts.o.weight").data.copy_(oracle.out_proj.weight)
    for name in ("down",):  # the MLP adds nothing
        ours.get_parameter(f"parts.{name}.weight").data.zero_()
    x = torch.randn(79, 24)
    batch = microbatch_of(scenario, (Sample(text_tokens=9), Sample(text_tokens=70)))
    result = ours({layer.sources[0].producer: x}, batch)
    norm = ours.parts["attn_norm"]
    for rows in (slice(0, 9), slice(9, 79)):
        expected = x[rows] + oracle(norm(x[rows]).unsqueeze(0)).squeeze(0)
        torch.testing.assert_close(result[rows], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [FULL, FROZEN], ids=["full", "frozen"])
def test_audio_may_pass_convolutions_over_frames_and_bins(training: Training) -> None:
    model = omni(training, FULL, FULL)
    front = AudioInput(mel_bins=7, frames_per_s=10, pad_s=None, channels=(3, 4), chunk_frames=6)
    modules = tuple(replace(m, audio=front) if m.name == "audio" else m for m in model.modules)
    samples = (Sample(text_tokens=5, audio_s=(1.1, 0.3), speech_tokens=3), Sample(text_tokens=4, speech_tokens=2))
    compare(replace(model, modules=modules), samples, "fp32")


def test_the_audio_front_end_equals_that_of_qwen3_omni() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe")
    config = modeling.Qwen3OmniMoeAudioEncoderConfig(
        num_mel_bins=10,
        d_model=16,
        encoder_layers=0,
        encoder_attention_heads=4,
        encoder_ffn_dim=8,
        downsample_hidden_size=3,
        n_window=4,
        max_source_positions=20,
        output_dim=8,
    )
    oracle = modeling.Qwen3OmniMoeAudioEncoder(config)
    front = AudioInput(mel_bins=10, frames_per_s=10, pad_s=None, channels=(3, 3, 3), chunk_frames=8)
    model = omni(FULL, FULL, FULL)
    modules = tuple(replace(m, audio=front) if m.name == "audio" else m for m in model.modules)
    scenario = scenario_of(replace(model, modules=modules))
    layer = graph_of(scenario.model).layer("audio.embed")
    ours = build_layer(layer)
    names = {"conv0": "conv2d1", "conv1": "conv2d2", "conv2": "conv2d3", "conv_out": "conv_out"}
    for own, theirs in names.items():
        source = dict(oracle.get_submodule(theirs).named_parameters())
        for kind, parameter in ours.get_submodule(f"parts.{own}").named_parameters():
            parameter.data.copy_(source[kind])
    batch = microbatch_of(scenario, (Sample(text_tokens=2, audio_s=(1.6,)),))
    frames = batch.inputs["audio"]
    chunks = frames.view(2, 1, 8, 10).transpose(2, 3)
    x = chunks
    for name in ("conv2d1", "conv2d2", "conv2d3"):
        x = torch.nn.functional.gelu(oracle.get_submodule(name)(x))
    expected = oracle.conv_out(x.permute(0, 3, 1, 2).flatten(2))
    table = ours({}, batch).detach() - expected.reshape(2, 16).detach()
    torch.testing.assert_close(table[0, :8], torch.zeros(8))  # sinusoids of the first position
