"""Each module of a family, and not only their sum, has the parameters of what it stands for in transformers' model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hf_oracle import meta_parameters

from mmplan.cost_models.formats.module_parameters import module_parameters
from mmplan.errors import InputError
from mmplan.scenario.formats.hf_config import read_config

EYE = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 40}
EYE |= {"image_size": 42, "patch_size": 14}
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40}
LLAMA |= {"num_hidden_layers": 2, "vocab_size": 60}
MISTRAL = LLAMA | {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 8}
QWEN2 = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2}
OPT = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "ffn_dim": 40, "vocab_size": 60}
QFORMER = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
QFORMER |= {"encoder_hidden_size": 24, "vocab_size": 50}
SAM = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 3, "mlp_dim": 40, "image_size": 64}
SAM |= {"patch_size": 4, "window_size": 3, "global_attn_indexes": [1], "output_channels": 8}
CONFORMER = {"hidden_dim": 32, "num_layers": 2, "num_heads": 4, "input_dim": 20, "output_dim": 6, "context_size": 9}
GEMMA4 = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 60}
GEMMA4 |= {"num_hidden_layers": 6, "intermediate_size": 40, "hidden_size_per_layer_input": 4}
GEMMA4 |= {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3}
DAVIT = {"depths": [1, 1, 2, 1], "embed_dim": [8, 16, 24, 32], "num_heads": [1, 2, 3, 4], "num_groups": [1, 2, 3, 4]}
DAVIT |= {"projection_dim": 32}
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 60, "encoder_ffn_dim": 40}
BART |= {"decoder_ffn_dim": 40, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
NEMOTRON = {"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
NEMOTRON |= {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 60}
NEMOTRON |= {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "moe_latent_size": 16}
EAR = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
PHI4 = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
PHI4 |= {"intermediate_size": 40, "vocab_size": 200_064}
PHI4_EAR = {"hidden_size": 32, "num_attention_heads": 4, "num_blocks": 2, "intermediate_size": 40, "input_size": 20}
PHI4_EAR |= {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16}
TABLES = r"|.*lm_head"

# Family -> (its config, module of mmplan -> what the names of its parameters match in transformers' model).
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "blip-2": (
        {"vision_config": EYE, "qformer_config": QFORMER, "text_config": OPT, "num_query_tokens": 5},
        {
            "vision": "vision_model",
            "qformer": "qformer|query_tokens",
            "projector": "language_projection",
            "llm": "language_model",
        },
    ),
    "idefics2": (
        {"vision_config": EYE, "text_config": MISTRAL, "perceiver_config": {"resampler_depth": 2}},
        {
            "vision": "model.vision_model",
            "projector": "model.connector.modality",
            "resampler": "model.connector.perceiver",
            "llm": "model.text_model" + TABLES,
        },
    ),
    "idefics": (
        {
            **{key: value for key, value in LLAMA.items() if key != "model_type"},
            "use_resampler": True,
            "cross_layer_interval": 2,
            "additional_vocab_size": 3,
            "vision_config": {**EYE, "embed_dim": 24},
            "perceiver_config": {"resampler_depth": 2},
        },
        {"vision": "model.vision_model", "resampler": "model.perceiver", "llm": r"(?!model.(vision|perceiver))"},
    ),
    "got_ocr2": (
        {"vision_config": SAM, "text_config": QWEN2},
        {
            "vision": r"model.vision_tower(?!.neck)",
            "vision_neck": "model.vision_tower.neck",
            "projector": "model.multi_modal_projector",
            "llm": "model.language_model" + TABLES,
        },
    ),
    "granite_speech": (
        {
            "encoder_config": CONFORMER,
            "projector_config": {**QFORMER, "encoder_hidden_size": 32},
            "text_config": {**LLAMA, "model_type": "granite"},
        },
        {
            "audio": "model.encoder",
            "qformer": r"model.projector(?!.linear)",
            "projector": "model.projector.linear",
            "llm": "model.language_model" + TABLES,
        },
    ),
    "phi4_multimodal": (
        {**PHI4, "vision_config": {**EYE, "image_size": 56, "crop_size": 56}, "audio_config": PHI4_EAR},
        {
            "vision": ".*img_processor",
            "vision_projector": ".*(img_projection|img_feature_extensor)",
            "audio": ".*audio_embed.encoder",
            "audio_projector": ".*audio_embed.(up|down)",
            "llm": r"(?!.*embed_tokens_extend)",
        },
    ),
    "gemma4": (
        {"text_config": GEMMA4, "vision_config": {"num_hidden_layers": 2}, "audio_config": {"num_hidden_layers": 2}},
        {
            "vision": "model.vision_tower",
            "projector": "model.embed_vision",
            "audio": r"model.audio_tower(?!.output_proj)",
            "audio_out": "model.audio_tower.output_proj",
            "audio_projector": "model.embed_audio",
            "llm": "model.language_model" + TABLES,
        },
    ),
    "florence2": (
        {"vision_config": DAVIT, "text_config": BART},
        {
            "vision": r"model.vision_tower.(convs|blocks).0",
            "vision_stage1": r"model.vision_tower.(convs|blocks).1",
            "vision_stage2": r"model.vision_tower.(convs|blocks).2",
            "vision_stage3": r"model.vision_tower.(convs|blocks).3",
            "projector": "model.multi_modal_projector",
            "encoder": "model.language_model.encoder",
            "llm": r"model.language_model.(?!encoder)",
        },
    ),
    "fuyu": (
        {"text_config": {**LLAMA, "model_type": "persimmon"}, "patch_size": 5},
        {"vision": "model.vision_embed_tokens", "llm": "model.language_model" + TABLES},
    ),
    "nemotron_h_omni": (
        {
            "text_config": NEMOTRON,
            "vision_config": {"num_hidden_layers": 2, "video_temporal_patch_size": 2, "video_patch_dim": 1536},
            "audio_config": {**EAR, "projection_hidden_size": 48, "projection_bias": False},
        },
        {
            "vision": "vision_model",
            "vision_projector": "multi_modal_projector",
            "audio": "audio_tower",
            "audio_projector": "embed_audio",
            "llm": "language_model",
        },
    ),
    "vision-encoder-decoder": (
        {
            "encoder": {"model_type": "vit", **EYE},
            "decoder": {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
            | {"is_decoder": True, "add_cross_attention": True, "intermediate_size": 40, "vocab_size": 60},
        },
        {"vision": "encoder", "projector": "enc_to_dec_proj", "llm": "decoder"},
    ),
    "kosmos-2": (
        {
            "vision_config": EYE,
            "text_config": {"embed_dim": 32, "ffn_dim": 40, "layers": 2, "attention_heads": 4, "vocab_size": 60},
        },
        {
            "vision": "vision_model",
            "projector": "image_to_text_projection.dense",
            "resampler": r"image_to_text_projection.(?!dense)",
            "llm": "text_model",
        },
    ),
    "granite4_vision": (
        {
            "vision_config": {"model_type": "siglip_vision_model", **EYE, "hidden_size": 64},
            "text_config": {**LLAMA, "model_type": "granite4_vision_text", "num_hidden_layers": 4},
            "downsample_rate": "1/3",
            "deepstack_layer_map": [[-1, 0], [1, 2]],
            "spatial_target_layers": [0, 1, 2, 3],
            "qformer_config": {"num_hidden_layers": 1, "intermediate_size": 48, "cross_attention_frequency": 1},
        },
        {
            "norm": r"model.layerwise_projectors.0.(norm|image_positions)",
            "queries": r"model.layerwise_projectors.0.(qformer|query)",
            "more_queries": r"model.(layerwise_projectors.1|spatial_projectors.\d).(qformer|query)",
            "more_projectors": r"model.(layerwise_projectors.1|spatial_projectors.\d).out_linear",
            "llm": "model.language_model" + TABLES,
        },
    ),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_module_has_the_parameters_of_transformers(tmp_path: Path, kind: str) -> None:
    values, names = FAMILIES[kind]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, **values}))
    theirs = meta_parameters(file)
    ours = module_parameters(read_config(file).model)
    assert sum(ours.values()) == sum(theirs.values())
    for module, pattern in names.items():
        assert ours[module] == sum(size for name, size in theirs.items() if re.match(pattern, name)), module


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "blip-2", "qformer_config": {"encoder_hidden_size": 7}},
            "qformer_config.encoder_hidden_size: the query transformer reads width 7, the tower gives 1408",
        ),
        (
            {"model_type": "granite_speech", "window_size": 14, "projector_config": {"encoder_hidden_size": 1024}},
            "downsample_rate: a window of 14 tokens is not a multiple of 5",
        ),
        (
            {"model_type": "gemma3n", "vision_config": {"architecture": "resnet50"}},
            "vision_config.architecture: 'resnet50' is not supported: the sizes of this tower of timm are not "
            "known here",
        ),
        (
            {"model_type": "minicpmv", "version": 4.5, "hidden_size": 64},
            "version: expected '2.5', '2.6', whose code is known here, found '4.5'",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "MX"},
            "hybrid_override_pattern: expected letters 'M', 'E', '*', '-', found 'MX'",
        ),
        (
            {"model_type": "step3p7", "num_hidden_layers": 45, "hidden_size": 4096},
            "text_config: sizes of the language model stand at the top, where the class of transformers does not read "
            "them: put them under text_config",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    with pytest.raises(InputError) as caught:
        read_config(file)
    assert str(caught.value) == f"{file}: {message}"


# Totals that the Hub tells of checkpoints whose code is no part of transformers.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "MiniCPM-V-2_6": (
        {
            "model_type": "minicpmv",
            "version": 2.6,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "query_num": 64,
            "vocab_size": 151666,
            "tie_word_embeddings": False,
            "vision_config": {
                "model_type": "siglip",
                "hidden_size": 1152,
                "image_size": 980,
                "intermediate_size": 4304,
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
            },
        },
        8_099_175_152,
    ),
    "Phi-3.5-vision-instruct": (
        {
            "model_type": "phi3_v",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32064,
            "img_processor": {"model_name": "openai/clip-vit-large-patch14-336"},
        },
        4_146_621_440,
    ),
    "DeepSeek-OCR": (
        {
            "model_type": "deepseek_vl_v2",
            "architectures": ["DeepseekOCRForCausalLM"],
            "language_config": {
                "vocab_size": 129280,
                "hidden_size": 1280,
                "intermediate_size": 6848,
                "moe_intermediate_size": 896,
                "num_hidden_layers": 12,
                "num_attention_heads": 10,
                "num_key_value_heads": 10,
                "n_routed_experts": 64,
                "num_experts_per_tok": 6,
                "n_shared_experts": 2,
                "first_k_dense_replace": 1,
            },
            "vision_config": {"model_name": "deeplip_b_l"},
        },
        3_336_106_240,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_checkpoints_with_code_of_their_own_have_the_total_of_the_hub(tmp_path: Path, name: str) -> None:
    values, total = PUBLISHED[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    assert sum(module_parameters(read_config(file).model).values()) == total
