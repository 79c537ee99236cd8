"""Families of Hugging Face models: parameters equal transformers', and what is not read is refused with its reason."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hf_oracle import parameter_count, parameters_on_meta

from mmplan.errors import InputError
from mmplan.scenario.attention_forms import Mla
from mmplan.scenario.formats.hf.class_defaults import FILE
from mmplan.scenario.formats.hf.refused import REFUSED
from mmplan.scenario.formats.hf_config import read_config, read_hf_config
from mmplan.scenario.scenario import Moe, Transformer

QWEN2 = {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 2}
QWEN2 |= {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 5000}
QWEN3_MOE = {"model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 16, "vocab_size": 5000}
MISTRAL = {"model_type": "mistral", "hidden_size": 640, "head_dim": 128, "num_hidden_layers": 2, "vocab_size": 5000}
GEMMA = {"model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 7, "vocab_size": 5000}
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 144, "num_attention_heads": 2, "num_hidden_layers": 2}
SIGLIP |= {"image_size": 56, "patch_size": 14, "vision_use_head": False}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
INTERN = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512, "num_hidden_layers": 2}
LLAMA4 = {"model_type": "llama4_text", "num_hidden_layers": 4, "hidden_size": 640, "num_attention_heads": 5}
LLAMA4 |= {"num_key_value_heads": 1, "vocab_size": 5000}
LLAMA4_VISION = {"hidden_size": 352, "intermediate_size": 1408, "num_hidden_layers": 2, "image_size": 56}
LLAMA4_VISION |= {"projector_input_dim": 640, "projector_output_dim": 640, "vision_output_dim": 640}
GLM_TEXT = {"model_type": "glm4v_moe_text", "head_dim": 128, "num_hidden_layers": 3, "n_routed_experts": 8}
DEEPSEEK = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "n_routed_experts": 8}
DEEPSEEK |= {"vocab_size": 5000, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1}

CLIP = {"model_type": "clip_vision_model", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
CLIP |= {"num_hidden_layers": 2, "image_size": 28, "patch_size": 14}
COHERE2 = {"model_type": "cohere2", "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 96}
COHERE2 |= {"num_hidden_layers": 5, "vocab_size": 500}
LLAMA = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 96}
LLAMA |= {"num_hidden_layers": 2, "vocab_size": 500}
IDEFICS = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 2}
IDEFICS |= {"image_size": 56, "patch_size": 14}
LINEAR = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "num_hidden_layers": 5, "vocab_size": 500}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
QWEN3_VISION = {"depth": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "out_hidden_size": 128}
EAR = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}
GEMMA4 = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 500}
GEMMA4 |= {"num_hidden_layers": 7, "hidden_size_per_layer_input": 0, "global_head_dim": 64}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 48}
MLLAMA_VISION = {"hidden_size": 64, "attention_heads": 4, "num_hidden_layers": 3, "num_global_layers": 2}
MLLAMA_VISION |= {"image_size": 28, "intermediate_layers_indices": [0, 2], "vision_output_dim": 192}
LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "hidden_size": 256}
LFM2 |= {"num_attention_heads": 8, "conv_bias": True, "block_ff_dim": 300, "tie_embedding": False, "vocab_size": 1000}
GLM_VISION = {"depth": 2, "hidden_size": 96, "num_heads": 4, "out_hidden_size": 128, "intermediate_size": 160}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama grouped": {"model_type": "llama", "num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral"},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2 moe": {"model_type": "qwen2_moe", "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "qwen3": {"model_type": "qwen3"},
    "qwen3 moe": {"model_type": "qwen3_moe"},
    "qwen3 moe, every second": {**QWEN3_MOE, "decoder_sparse_step": 2},
    "qwen3 moe, first dense": {**QWEN3_MOE, "mlp_only_layers": [0, 1]},
    "qwen3 moe, last dense": {**QWEN3_MOE, "mlp_only_layers": [2]},
    "qwen3 next": {"model_type": "qwen3_next", **LINEAR},
    "mixtral": {"model_type": "mixtral"},
    "gpt oss": {"model_type": "gpt_oss"},
    "deepseek v2": {"model_type": "deepseek_v2", "num_experts_per_tok": 6},
    "deepseek v3": {"model_type": "deepseek_v3", **DEEPSEEK},
    "deepseek without query compression": {"model_type": "deepseek_v3", **DEEPSEEK, "q_lora_rank": None},
    "gemma 2": {"model_type": "gemma2"},
    "gemma 3": {**GEMMA},
    "olmo 2": {"model_type": "olmo2"},
    "cohere": {**COHERE2},
    "opt": {"model_type": "opt"},
    "ernie moe": {"model_type": "ernie4_5_moe", "moe_layer_interval": 2},
    "llama 4 text": {**LLAMA4},
    "internvl, layer norms": {"model_type": "internvl", "vision_config": INTERN, "text_config": QWEN2},
    "internvl, rms norms and experts": {
        "model_type": "internvl",
        "tie_word_embeddings": False,
        "vision_config": {**INTERN, "norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": True},
        "text_config": QWEN3_MOE,
    },
    "gemma 3 with vision": {
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
        "text_config": GEMMA,
        "vision_config": SIGLIP,
    },
    "gemma 4 with experts and vision": {
        "model_type": "gemma4",
        "text_config": {**GEMMA4, **GEMMA4_EXPERTS, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        "vision_config": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32},
    },
    "gemma 4 without vision": {"model_type": "gemma4", "text_config": GEMMA4, "tie_word_embeddings": False},
    "pixtral": {"model_type": "llava", "text_config": MISTRAL, "vision_config": PIXTRAL},
    "llava over qwen3 moe": {"model_type": "llava", "text_config": QWEN3_MOE, "vision_config": CLIP},
    "llava, tied in the text config": {
        "model_type": "llava",
        "tie_word_embeddings": False,
        "text_config": {**QWEN2, "tie_word_embeddings": True},
        "vision_config": CLIP,
    },
    "mistral 3": {"model_type": "mistral3", "text_config": MISTRAL, "vision_config": PIXTRAL},
    "mistral 3 of the class": {"model_type": "mistral3"},
    "mistral 3 untied": {
        "model_type": "mistral3",
        "tie_word_embeddings": False,
        "text_config": MISTRAL,
        "vision_config": PIXTRAL,
    },
    "llava next": {"model_type": "llava_next", "text_config": {"num_hidden_layers": 2}},
    "llava next, mistral": {"model_type": "llava_next", "text_config": MISTRAL},
    "llava onevision": {
        "model_type": "llava_onevision",
        "text_config": QWEN2,
        "vision_config": {**SIGLIP, "image_size": 60},
    },
    "llama 4": {"model_type": "llama4", "text_config": LLAMA4, "vision_config": LLAMA4_VISION},
    "llama 4, every second with experts": {
        "model_type": "llama4",
        "text_config": {**LLAMA4, "interleave_moe_layer_step": 2},
        "vision_config": LLAMA4_VISION,
    },
    "mllama": {
        "model_type": "mllama",
        "text_config": {"num_hidden_layers": 5, "hidden_size": 640, "num_attention_heads": 5, "num_key_value_heads": 1},
        "vision_config": MLLAMA_VISION,
    },
    "glm 4v": {
        "model_type": "glm4v",
        "vision_config": GLM_VISION,
        "text_config": {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2},
    },
    "glm 4.5v": {"model_type": "glm4v_moe", "text_config": GLM_TEXT, "vision_config": {"depth": 2}},
    "paligemma": {
        "model_type": "paligemma",
        "projection_dim": 640,
        "vision_config": {**SIGLIP, "projection_dim": 640},
        "text_config": {"model_type": "gemma", "hidden_size": 640, "num_hidden_layers": 2, "vocab_size": 5000},
    },
    "idefics 3": {"model_type": "idefics3", "text_config": LLAMA, "vision_config": IDEFICS},
    "smolvlm": {"model_type": "smolvlm", "text_config": LLAMA, "vision_config": IDEFICS, "scale_factor": 4},
    "aya vision": {"model_type": "aya_vision", "text_config": COHERE2, "vision_config": SIGLIP},
    "command a vision": {
        "model_type": "cohere2_vision",
        "text_config": COHERE2,
        "vision_config": SIGLIP,
        "alignment_intermediate_size": 192,
    },
    "qwen3.5": {"model_type": "qwen3_5", "text_config": LINEAR, "vision_config": QWEN3_VISION},
    "qwen3.5 with experts": {
        "model_type": "qwen3_5_moe",
        "text_config": {**LINEAR, "num_experts": 6, "num_experts_per_tok": 2},
        "vision_config": QWEN3_VISION,
    },
    "lfm2 vl": {"model_type": "lfm2_vl", "text_config": LFM2, "vision_config": {"vision_use_head": False}},
    "vip llava": {"model_type": "vipllava", "text_config": LLAMA, "vision_config": CLIP},
    "hyperclovax": {"model_type": "hyperclovax_vision_v2"},
    "clip": {"model_type": "clip", "vision_config": CLIP, "text_config": {"num_hidden_layers": 2}},
    "siglip": {"model_type": "siglip", "vision_config": {**SIGLIP, "vision_use_head": True}},
    "siglip tower": {**SIGLIP},
    "siglip 2": {"model_type": "siglip2"},
    "dinov2": {"model_type": "dinov2"},
    "whisper": {"model_type": "whisper"},
    "qwen3 omni": {
        "model_type": "qwen3_omni_moe",
        "thinker_config": {
            "audio_config": {**EAR, "output_dim": 128, "downsample_hidden_size": 12},
            "vision_config": {**QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
            "text_config": {
                "hidden_size": 128,
                "num_attention_heads": 4,
                "num_hidden_layers": 3,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "vocab_size": 500,
            },
        },
    },
    "qwen2 audio": {"model_type": "qwen2_audio", "text_config": QWEN2, "audio_config": EAR},
    "voxtral": {"model_type": "voxtral", "text_config": {**LLAMA, "num_key_value_heads": 2}},
    "audio flamingo 3": {"model_type": "audioflamingo3", "text_config": QWEN2},
}


def write(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return file


@pytest.mark.parametrize("name", MODELS)
def test_a_family_has_the_parameters_of_transformers(tmp_path: Path, name: str) -> None:
    file = write(tmp_path, MODELS[name])
    assert parameter_count(read_config(file).model) == parameters_on_meta(file)


def _text(tmp_path: Path, name: str) -> Transformer:
    shape = read_hf_config(write(tmp_path, MODELS[name])).module("llm").transformer
    assert shape is not None
    return shape


def test_experts_and_latent_attention_are_read_as_they_are(tmp_path: Path) -> None:
    shape = _text(tmp_path, "deepseek v3")
    assert shape.mla == Mla(q_lora=1536, kv_lora=512, qk_nope=128, qk_rope=64, v_dim=128)
    assert shape.moe == Moe(
        experts=8, topk=8, expert_ffn=2048, shared_ffn=2048, first_dense=2, scoring="sigmoid", every=1
    )
    shape = _text(tmp_path, "qwen3 moe, every second")
    assert shape.moe is not None and [shape.moe.in_layer(i) for i in range(3)] == [False, True, False]


def test_windows_slide_in_gemma_and_are_blocks_in_llama_4(tmp_path: Path) -> None:
    gemma = _text(tmp_path, "gemma 3")
    assert (gemma.window_tokens, gemma.sliding, gemma.global_layers) == (4096, True, (5,))
    llama = _text(tmp_path, "llama 4")
    assert (llama.window_tokens, llama.sliding, llama.global_layers) == (8192, False, (3,))


def test_internvl_chat_files_give_the_model_of_transformers(tmp_path: Path) -> None:
    chat = {
        "model_type": "internvl_chat",
        "downsample_ratio": 0.5,
        "llm_config": QWEN2,
        "vision_config": {**INTERN, "image_size": 448, "norm_type": "layer_norm", "qk_normalization": False},
    }
    ours = read_hf_config(write(tmp_path, chat))
    values = {"model_type": "internvl", "tie_word_embeddings": False, "text_config": QWEN2, "vision_config": INTERN}
    assert ours.modules == read_hf_config(write(tmp_path, values)).modules


@pytest.mark.parametrize("kind", REFUSED)
def test_a_family_that_is_not_read_is_refused_with_its_reason(tmp_path: Path, kind: str) -> None:
    with pytest.raises(InputError) as caught:
        read_hf_config(write(tmp_path, {"model_type": kind}))
    assert str(caught.value).endswith(f": model_type '{kind}' is not supported: {REFUSED[kind]}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "llama4"},
            "vision_config.hidden_size: 4 joined tokens of width 768 are 3072, the adapter takes intermediate_size = "
            "5632 (the class's defaults: this file has no vision_config)",
        ),
        ({"model_type": "qwen3_vl"}, "'projector' gives width 3584, 'llm' has hidden size 4096"),
        (
            {"model_type": "gemma3", "vision_config": SIGLIP},
            "mm_tokens_per_image: 16 patches cannot be averaged to 256 tokens",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts_per_tok": 200},
            "num_experts_per_tok: 200 experts of a token are more than num_experts = 128",
        ),
        (
            {"model_type": "internvl", "downsample_ratio": 0.3},
            "downsample_ratio: expected 1, 0.5 or 0.25, found 0.3",
        ),
    ],
)
def test_a_config_that_does_not_fit_together_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    file = write(tmp_path, values)
    with pytest.raises(InputError) as caught:
        read_hf_config(file)
    assert str(caught.value) == f"{file}: {message}"


def test_class_defaults_are_those_of_the_installed_classes() -> None:
    transformers = pytest.importorskip("transformers")
    rows = json.loads(FILE.read_text())
    if rows.pop("transformers") != transformers.__version__:
        pytest.skip("the defaults were written from another version")
    registered = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    classes = {kind: registered[kind] for kind in rows if kind in registered}
    nested = [spec for config in classes.values() for spec in (getattr(config, "sub_configs", None) or {}).values()]
    nested = [getattr(spec, "config_class", spec) for spec in nested]
    classes = {getattr(inner, "model_type", ""): inner for inner in nested} | classes
    for kind, row in rows.items():
        fields = {field.name: field for field in dataclasses.fields(classes[kind])}
        for key, value in row["keys"].items():
            made = fields[key].default_factory
            given = fields[key].default if made is dataclasses.MISSING else made()
            assert (list(given) if isinstance(given, tuple) else given) == value, (kind, key)


def test_a_null_says_none_where_the_class_has_a_default(tmp_path: Path) -> None:
    shape = _text(tmp_path, "deepseek without query compression")
    assert shape.mla is not None and shape.mla.q_lora is None


def test_layers_of_gemma_4_have_heads_of_two_kinds(tmp_path: Path) -> None:
    shape = _text(tmp_path, "gemma 4 with experts and vision")
    full, near = shape.at(5), shape.at(0)
    assert (full.head_dim, full.kv_heads, full.keys_as_values, full.window_tokens) == (64, 1, True, None)
    assert (near.head_dim, near.kv_heads, near.keys_as_values, near.window_tokens) == (32, 2, False, 512)
    assert [shape.at(index) == full for index in range(7)] == [False] * 5 + [True, True]
