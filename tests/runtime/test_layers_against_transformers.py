"""Blocks against the Hugging Face module of the same shape and weights; RMS norm against its derivatives."""

from collections.abc import Mapping

import pytest
import torch
from layer_zoo import FULL, graph_of, llava, microbatch_of, omni, scenario_of
from torch import Tensor, nn

from mmplan.cost_models.layer import Layer
from mmplan.runtime.layers import build_layer
from mmplan.runtime.norms import GroupedNorm, rms_norm
from mmplan.scenario.scenario import Sample

transformers = pytest.importorskip("transformers")
SAMPLES = (Sample(text_tokens=9), Sample(text_tokens=4))


def _copy(module: nn.Module, oracle: nn.Module, names: Mapping[str, str]) -> None:
    """Weights of `oracle` into ours: our part name -> its module path."""
    for ours, theirs in names.items():
        source = dict(oracle.get_submodule(theirs).named_parameters())
        for kind, parameter in module.get_submodule(f"parts.{ours}").named_parameters():
            parameter.data.copy_(source[kind])


def _random(oracle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in oracle.parameters():
        nn.init.normal_(parameter, std=0.3)
    return oracle.eval()


def _inputs(layer: Layer, x: Tensor) -> dict[str, Tensor]:
    return {layer.sources[0].producer: x}


def test_language_model_block_equals_llama_decoder_layer() -> None:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        intermediate_size=40,
        rms_norm_eps=1e-6,
        num_hidden_layers=2,
    )
    config._attn_implementation = "sdpa"
    oracle = _random(LlamaDecoderLayer(config, 0))
    scenario = scenario_of(llava(FULL, FULL, FULL))
    layer = graph_of(scenario.model).layer("llm.0")
    module = build_layer(layer)
    names = {part: f"self_attn.{part}_proj" for part in "qkvo"}
    names |= {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    _copy(module, oracle, names | {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})
    x = torch.randn(13, 24)
    packed = module(_inputs(layer, x), microbatch_of(scenario, SAMPLES))
    rotary = LlamaRotaryEmbedding(config)
    for rows in (slice(0, 9), slice(9, 13)):
        alone = x[rows].unsqueeze(0)
        position = torch.arange(alone.shape[1]).unsqueeze(0)
        result = oracle(alone, position_embeddings=rotary(alone, position))
        expected = result[0] if isinstance(result, tuple) else result
        torch.testing.assert_close(packed[rows], expected.reshape(-1, 24), rtol=1e-5, atol=1e-5)


def test_vision_embedding_and_block_equal_clip() -> None:
    from transformers.models.clip.modeling_clip import CLIPEncoderLayer, CLIPVisionConfig, CLIPVisionEmbeddings

    config = CLIPVisionConfig(
        hidden_size=16, num_attention_heads=4, intermediate_size=36, image_size=6, patch_size=2, hidden_act="gelu"
    )
    config._attn_implementation = "sdpa"
    embeddings, block = _random(CLIPVisionEmbeddings(config)), _random(CLIPEncoderLayer(config))
    scenario = scenario_of(llava(FULL, FULL, FULL))
    graph, samples = graph_of(scenario.model), (Sample(text_tokens=3, images=((6, 6), (6, 6))),)
    batch = microbatch_of(scenario, samples)
    embed, first = build_layer(graph.layer("vision.embed")), build_layer(graph.layer("vision.0"))
    convolution = embeddings.get_parameter("patch_embedding.weight")
    embed.get_parameter("parts.patch.weight").data.copy_(convolution.flatten(1))
    embed.get_parameter("parts.class_token.weight").data.copy_(embeddings.get_parameter("class_embedding"))
    _copy(embed, embeddings, {"positions": "position_embedding"})
    names = {part: f"self_attn.{part}_proj" for part in "qkv"} | {"o": "self_attn.out_proj"}
    names |= {"up": "mlp.fc1", "down": "mlp.fc2", "attn_norm": "layer_norm1", "mlp_norm": "layer_norm2"}
    _copy(first, block, names)
    images = batch.inputs["vision"].view(2, 3, 3, 3, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 6, 6)
    expected = torch.nn.functional.layer_norm(embeddings(images), (16,))
    ours = embed({}, batch)
    torch.testing.assert_close(ours, expected.reshape(20, 16), rtol=1e-5, atol=1e-5)
    result = block(expected, attention_mask=None)
    result = result[0] if isinstance(result, tuple) else result
    ours = first(_inputs(graph.layer("vision.0"), ours), batch)
    torch.testing.assert_close(ours, result.reshape(20, 16), rtol=1e-5, atol=1e-5)


def test_audio_front_end_equals_whisper_convolutions() -> None:
    from transformers.models.whisper.modeling_whisper import WhisperConfig, WhisperEncoder

    config = WhisperConfig(
        num_mel_bins=7, d_model=16, encoder_layers=0, encoder_attention_heads=4, max_source_positions=20
    )
    oracle = _random(WhisperEncoder(config))
    scenario = scenario_of(omni(FULL, FULL, FULL))
    layer, samples = graph_of(scenario.model).layer("audio.embed"), (Sample(text_tokens=2, audio_s=(4.0, 4.0)),)
    batch = microbatch_of(scenario, samples)
    module = build_layer(layer)
    _copy(module, oracle, {"conv1": "conv1", "conv2": "conv2"})
    module.get_parameter("parts.positions.weight").data[:20].copy_(oracle.get_parameter("embed_positions.weight"))
    result = oracle(batch.inputs["audio"].view(2, 40, 7).transpose(1, 2)).last_hidden_state
    final = oracle.get_submodule("layer_norm")
    torch.testing.assert_close(final(module({}, batch)), result.reshape(40, 16), rtol=1e-5, atol=1e-5)


def test_rms_norm_has_right_first_and_second_derivatives() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rms_norm, (x, weight))
    assert torch.autograd.gradgradcheck(rms_norm, (x, weight))


def test_rms_norm_equals_torch() -> None:
    x, norm = torch.randn(7, 12), GroupedNorm(12, "rms", groups=3)
    nn.init.normal_(norm.weight)
    expected = torch.nn.functional.rms_norm(x.view(7, 3, 4), (4,), norm.weight, 1e-6)
    torch.testing.assert_close(norm(x), expected.view(7, 12))
