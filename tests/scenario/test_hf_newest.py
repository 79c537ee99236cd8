"""Families with residual streams, chosen keys, looped or learned positions: small files of each, as transformers builds
them, and what their steps compute."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import forward_flops
from mmplan.cost_models.formats.module_parameters import module_parameters
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.loads import sequence_lengths, summed_loads
from mmplan.errors import InputError
from mmplan.scenario.formats.hf_config import read_config
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Model, Sample

ROOT = Path(__file__).parents[2]
QWEN4_EYE = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
QWEN4_TEXT = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 500}
QWEN4_TEXT |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "linear_num_key_heads": 2}
QWEN4_TEXT |= {"linear_num_value_heads": 4, "shared_expert_intermediate_size": 32, "hc_lowrank": 16}
QWEN4_TEXT |= {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 64}
QWEN4_TEXT |= {"indexer_compress_ratio": 8, "eos_token_id": 1}
QWEN4 = {"vision_config": QWEN4_EYE, "text_config": QWEN4_TEXT}
WORDS = {"ple_layer_ids": [1, 3], "ngram_vocab_size_base": 90, "ple_embed_dim": 32, "heads_per_ngram": 4}
GLM5_EYE = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
GLM5_TEXT = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4}
GLM5_TEXT |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "intermediate_size": 80}
GLM5_TEXT |= {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "vocab_size": 500}
GLM5_TEXT |= {"pad_token_id": 0, "linear_head_dim": 16, "linear_num_heads": 4, "index_n_heads": 2, "index_head_dim": 16}
GLM5 = {"vision_config": GLM5_EYE, "text_config": GLM5_TEXT}
HY_EYE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
HY_EYE |= {"out_hidden_size": 64, "max_image_size": 128}
HY_TEXT = {**GLM5_TEXT, "qk_rope_head_dim": 8, "rope_parameters": {"mrope_section": [2, 1, 1], "rope_type": "default"}}
HY_TEXT["rope_parameters"] |= {"rope_theta": 1e4}
HY4 = {"vision_config": HY_EYE, "text_config": {**HY_TEXT, "num_key_value_heads": 2}}
DOTS_EYE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96}
DOTS_EYE |= {"moe_intermediate_size": 32, "adapter_in_dim": 64, "adapter_out_dim": 64}
DOTS_EYE |= {"pyramid_num_routed": [-1, -1, 2, 4]}
DOTS_EAR = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
DOTS_EAR |= {"downsample_hidden_size": 16, "adapter_input_size": 64, "adapter_out_dim": 64}
DOTS_TEXT = {**GLM5_TEXT, "num_hidden_layers": 6, "qk_rope_head_dim": 16, "head_dim": 32}
DOTS_TEXT |= {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "shared_experts_intermediate_size": 24}
DOTS = {"vision_config": DOTS_EYE, "audio_config": DOTS_EAR, "text_config": DOTS_TEXT}
INKLING_TEXT = {"hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2}
INKLING_TEXT |= {"head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 16}
INKLING_TEXT |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "vocab_size": 500}
INKLING_TEXT |= {"intermediate_size": 80, "sliding_window_size": 32, "rel_extent": 64}
INKLING_EYE = {"patch_size": 4, "num_hidden_layers": 6, "temporal_patch_size": 2}
INKLING_EAR = {"n_mel_bins": 8, "mel_vocab_size": 16}
INKLING = {"text_config": INKLING_TEXT, "vision_config": INKLING_EYE, "audio_config": INKLING_EAR}
INKLING2_TEXT = {key: value for key, value in INKLING_TEXT.items() if key != "intermediate_size"}
INKLING2_TEXT |= {"unpadded_vocab_size": 480, "n_layers_per_attn_res_block": 3}
INKLING2_EYE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "text_hidden_size": 64}
INKLING2 = {"text_config": INKLING2_TEXT, "vision_config": {**INKLING2_EYE, "projection_hidden_dim": 96}}
CONVNET = {"base_channels": 32, "num_res_blocks": 2, "channel_multiplier": [1, 2], "attn_resolutions": [128]}
CONVNET |= {"latent_channels": 8, "embed_dim": 8, "codebook_size": 64}
APERTUS_TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
APERTUS = {"vision_config": CONVNET, "audio_config": {"model_type": "wavtokenizer_encoder", "codebook_size": 64}}
APERTUS |= {"text_config": {**APERTUS_TEXT, "vocab_size": 300}, "image_token_offset": 100, "audio_token_offset": 164}
ULTRA_TEXT = {"model_type": "ultrabert", **APERTUS_TEXT, "vocab_size": 500}
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIGLIP |= {"intermediate_size": 96, "image_size": 64, "patch_size": 16, "vision_use_head": False}
JEV_TEXT = {"model_type": "qwen3", **APERTUS_TEXT, "num_key_value_heads": 2, "vocab_size": 500}
ASR = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
HEAD = {"hidden_size": 24, "audio_hidden_size": 64}
DIARIZATION = {"model_type": "nemotron3_diarization", "audio_config": ASR, "head_config": HEAD}
NEMO_TEXT = {"model_type": "nemotron_h", **APERTUS_TEXT, "hybrid_override_pattern": "ME*", "vocab_size": 500}
NEMO_TEXT |= {"num_key_value_heads": 2, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "head_dim": 16}
NEMO_TEXT |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
del NEMO_TEXT["num_hidden_layers"]
TIMES = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 50, "blank_token_id": 49}
NEMO = {"audio_config": {"asr_config": ASR, "diarization_config": DIARIZATION}, "text_config": NEMO_TEXT}
NEMO |= {"word_timestamp_config": TIMES}

DSA = {**GLM5_TEXT, "qk_rope_head_dim": 8, "first_k_dense_replace": 1}
KIMI = {**APERTUS_TEXT, "num_hidden_layers": 5, "num_key_value_heads": 4, "vocab_size": 500, "pad_token_id": 0}
KIMI |= {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "linear_num_heads": 4}
KIMI |= {"linear_head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
T5 = {**APERTUS_TEXT, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500}
GEMMA = {**T5, "hidden_size_per_layer_input": 24, "embedding_dim": 40, "global_head_dim": 32}
DBRX = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 500, "attn_config": {"kv_n_heads": 2}}
DBRX |= {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}}
DBRX["attn_config"] |= {"rope_theta": 1e4}
DBRX |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
SMALL_BERT = {"model_type": "bert", **APERTUS_TEXT, "vocab_size": 500, "max_position_embeddings": 40}
SAID = {**SMALL_BERT, "hidden_size": 32, "is_decoder": True, "add_cross_attention": True}
REPVIT = {"model_type": "timm_wrapper", "architecture": "timm/repvit_m1_1.dist_450e_in1k"}
REPVIT_WIDTHS = {"backbone_channel_list": [512, 256, 128, 64]}
STREAMING = {"encoder_config": {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96}}
STREAMING |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96}
CONFORMER = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96}

FILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen4_exp": ("qwen4_exp", "Qwen4ExpForConditionalGeneration", QWEN4),
    "qwen4_exp with n-grams": (
        "qwen4_exp",
        "Qwen4ExpForConditionalGeneration",
        {**QWEN4, "text_config": {**QWEN4_TEXT, **WORDS, "hc_count": 2}},
    ),
    "glm5_next": ("glm5_next", "Glm5NextForConditionalGeneration", GLM5),
    "glm5_next with shared choices": (
        "glm5_next",
        "Glm5NextForConditionalGeneration",
        {**GLM5, "text_config": {**GLM5_TEXT, "layer_types": ["full_attention"] * 5, "index_topk_pattern": "FSSFS"}},
    ),
    "hy_v4_vl": ("hy_v4_vl", "HYV4VLForConditionalGeneration", HY4),
    "dots3_note": ("dots3_note", "Dots3NoteForConditionalGeneration", DOTS),
    "dots3_note without index": (
        "dots3_note",
        "Dots3NoteForConditionalGeneration",
        {**DOTS, "text_config": {**DOTS_TEXT, "use_dsa": False, "first_k_dense_replace": 3}},
    ),
    "inkling": ("inkling_mm_model", "InklingForConditionalGeneration", INKLING),
    "inkling with dense layers": (
        "inkling_mm_model",
        "InklingForConditionalGeneration",
        {**INKLING, "text_config": {**INKLING_TEXT, "dense_intermediate_size": 160, "dense_mlp_idx": 2}},
    ),
    "inkling2": ("inkling2", "Inkling2ForConditionalGeneration", INKLING2),
    "apertus1p5": ("apertus1p5", "Apertus1p5ForConditionalGeneration", APERTUS),
    "apertus1p5 with a pruned head": (
        "apertus1p5",
        "Apertus1p5ForConditionalGeneration",
        {**APERTUS, "text_config": {**APERTUS_TEXT, "vocab_size": 300, "output_vocab_size": 90}},
    ),
    "ultravbert": ("ultravbert", "UltraVBertModel", {"text_config": ULTRA_TEXT, "vision_config": SIGLIP}),
    "jev": ("jev", "JevForDecision", {"text_config": JEV_TEXT, "hidden_size": 64}),
    "nemo_speechlm": ("nemo_speechlm", "Nemotron3_5TranscribeForConditionalGeneration", NEMO),
    "nemotron3_diarization": ("nemotron3_diarization", "Nemotron3DiarizationModel", DIARIZATION),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32ForCausalLM", DSA),
    "glm_moe_dsa": ("glm_moe_dsa", "GlmMoeDsaForCausalLM", {**DSA, "indexer_types": ["full", "shared"] * 2 + ["full"]}),
    "kimi_linear": ("kimi_linear", "KimiLinearForCausalLM", KIMI),
    "kimi_linear with released keys": (
        "kimi_linear",
        "KimiLinearForCausalLM",
        {
            **KIMI,
            "linear_attn_config": {
                "full_attn_layers": [2, 5],
                "kda_layers": [1, 3, 4],
                "head_dim": 32,
                "num_heads": 2,
                "short_conv_kernel_size": 3,
            },
        },
    ),
    "embedding_gemma2": ("embedding_gemma2", "EmbeddingGemma2Model", {"text_config": GEMMA}),
    "mpt": ("mpt", "MptForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 2, "expansion_ratio": 3}),
    "dbrx": ("dbrx", "DbrxForCausalLM", DBRX),
    "t5gemma": (
        "t5gemma",
        "T5GemmaForConditionalGeneration",
        {"encoder": T5, "decoder": {**T5, "num_hidden_layers": 3}},
    ),
    "encoder-decoder": ("encoder-decoder", "EncoderDecoderModel", {"encoder": SMALL_BERT, "decoder": SAID}),
    "lasr_ctc": ("lasr_ctc", "LasrForCTC", {"encoder_config": CONFORMER}),
    "granite_speech5_ctc": ("granite_speech5_ctc", "GraniteSpeech5ForCTC", {"encoder_config": CONFORMER}),
    "nemotron_asr_streaming": ("nemotron_asr_streaming", "NemotronAsrStreamingForRNNT", {"encoder_config": CONFORMER}),
    "nemotron3_5_asr": ("nemotron3_5_asr", "Nemotron3_5AsrForRNNT", {"encoder_config": CONFORMER, "num_prompts": 7}),
    "moonshine_streaming": ("moonshine_streaming", "MoonshineStreamingForConditionalGeneration", STREAMING),
}


def _read(folder: Path, values: dict[str, Any]) -> Model:
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return read_config(file).model


@pytest.mark.parametrize("name", FILES)
def test_a_small_file_has_the_parameters_of_transformers(tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    kind, named, values = FILES[name]
    found = sum(module_parameters(_read(tmp_path, {"model_type": kind, **values})).values())
    config = transformers.AutoConfig.for_model(**{"model_type": kind, **copy.deepcopy(values)})
    with torch.device("meta"):
        model = getattr(transformers, named)(config)
    assert found == sum(parameter.numel() for parameter in model.parameters())


def test_a_tower_of_timm_has_the_numbers_of_its_table(tmp_path: Path) -> None:
    """RepViT-M1.1 has 8.2 million numbers with its head (arXiv 2307.09283, table 1); a head of 1,000 classes, which
    features lack, has 0.5 of them, and training has norms of branches that inference merges."""
    model = _read(tmp_path, {"model_type": "edgetam_vision_model", "backbone_config": REPVIT, **REPVIT_WIDTHS})
    stages = [count for name, count in module_parameters(model).items() if "neck" not in name]
    assert len(stages) == 4
    assert 7_600_000 < sum(stages) < 7_900_000


def test_rows_are_halved_where_a_conformer_says_so(tmp_path: Path) -> None:
    model = _read(tmp_path, {"model_type": "granite_speech5_ctc", "encoder_config": {"subsample_layers": [1]}})
    lengths = sequence_lengths(model, Sample(text_tokens=1, audio_s=(4.0,)))
    assert (lengths["audio"], lengths["audio_stage1"]) == ((200,), (100,))


def _graph(folder: Path, name: str) -> tuple[Model, ComputationGraph]:
    kind, _, values = FILES[name]
    model = _read(folder, {"model_type": kind, **values})
    return model, build_graph(replace(load_scenario(ROOT / "scenarios" / "tiny.yaml"), model=model))


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("qwen4_exp", [64] + [4 * 64] * 3 + [64]),
        ("glm5_next", [64] + [4 * 64] * 4 + [64]),
        ("inkling2", [64, 2 * 64, 2 * 64, 2 * 64, 3 * 64, 3 * 64, 3 * 64, 64]),  # one more behind every third block
    ],
)
def test_stages_send_all_streams_between_blocks(tmp_path: Path, name: str, widths: list[int]) -> None:
    _, graph = _graph(tmp_path, name)
    layers = [layer for layer in graph.layers() if layer.module == "llm" and layer.kind in ("token_embed", "block")]
    assert [layer.output.width for layer in layers] == widths


def test_a_block_between_streams_computes_what_its_linears_do(tmp_path: Path) -> None:
    """Block 1 of GLM5: Kimi delta attention and an MLP of width 80 on 64 columns, two mixings of four streams."""
    model, graph = _graph(tmp_path, "glm5_next")
    tokens = 100
    load = summed_loads(model, [Sample(text_tokens=tokens)])["llm"]
    block = next(layer for layer in graph.layers() if layer.id == "llm.1")
    rule = next(op for op in block.ops if type(op).__name__ == "DeltaRule")
    q_k_v_out, gates, steps, mlp = 4 * 64 * 64, 2 * (64 * 16 + 16 * 64), 64 * 4, 3 * 64 * 80
    mixing = 2 * 4 * 64 * (4 + 4 + 16)
    convolutions = 0  # they take the time of their bytes
    linears = 2 * tokens * (q_k_v_out + gates + steps + mlp + mixing + convolutions)
    assert forward_flops(block, load) == linears + load.chunk_tokens * 4 * rule.row_flops()  # type: ignore[union-attr]


def test_pooled_keys_are_scored_once_for_each_pool(tmp_path: Path) -> None:
    """Qwen4's index: 2 heads of 32 over every 8th row, without values."""
    model, graph = _graph(tmp_path, "qwen4_exp")
    load = summed_loads(model, [Sample(text_tokens=160)])["llm"]
    block = next(layer for layer in graph.layers() if layer.id == "llm.3")
    index = next(op for op in block.ops if type(op).__name__ == "Attention" and op.y.width == 0)
    assert index.pairs.of(load) == 160 * 160 / 8  # type: ignore[union-attr]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "qwen4_exp"}, "text_config.indexer_budget: this key is missing; found no keys"),
    (
        {"model_type": "qwen4_exp", **QWEN4, "text_config": {**QWEN4_TEXT, "num_experts": 0}},
        "text_config.num_experts: expected a whole number from 1 to 100,000, found 0",
    ),
    (
        {"model_type": "inkling_mm_model", **INKLING, "vision_config": {"patch_size": 40, "num_hidden_layers": 3}},
        "vision_config.num_hidden_layers: 3 layers are fewer than the 6 scales of a patch",
    ),
    (
        {"model_type": "inkling2_loop"},
        "model_type 'inkling2_loop' is not supported: its middle layers run several times on the same weights, and a "
        "layer here runs once",
    ),
    (
        {"model_type": "jev", "text_config": JEV_TEXT},
        "hidden_size: expected the model's width 64, found 4,096",
    ),
    (
        {"model_type": "inkling2", **INKLING2, "text_config": {**INKLING2_TEXT, "unpadded_vocab_size": 600}},
        "text_config.unpadded_vocab_size: expected at most vocab_size = 500, found 600",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_a_newest_family_cannot_mean_is_one_sentence(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        _read(tmp_path, values)
    assert str(caught.value) == f"{tmp_path / 'config.json'}: {message}"
