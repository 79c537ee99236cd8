"""Families beyond tower and language model: parameters of classes and of published checkpoints, rows, refusals."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from mmplan.cost_models.formats.module_parameters import module_parameters
from mmplan.cost_models.loads import sequence_lengths, summed_loads
from mmplan.errors import InputError
from mmplan.scenario.formats.hf.class_defaults import defaults_of
from mmplan.scenario.formats.hf_config import read_config
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Model, Sample

QWEN7 = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN7 |= {"num_hidden_layers": 28, "vocab_size": 152064}
DONUT = {"model_type": "donut-swin", "image_size": [2560, 1920], "depths": [2, 2, 14, 2], "embed_dim": 128}
DONUT |= {"num_heads": [4, 8, 16, 32], "window_size": 10}
MBART = {"model_type": "mbart", "is_decoder": True, "add_cross_attention": True, "decoder_layers": 4}
MBART |= {"max_position_embeddings": 1536, "vocab_size": 57580}

# model_type: class of transformers, and keys without which its defaults do not fit together.
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "aimv2": ("Aimv2Model", {}),
    "align": ("AlignModel", {}),
    "bark": ("BarkModel", {}),
    "bridgetower": ("BridgeTowerModel", {}),
    "beit": ("BeitModel", {}),
    "bros": ("BrosModel", {}),
    "clap": ("ClapModel", {}),
    "clvp": ("ClvpModelForConditionalGeneration", {}),
    "csm": ("CsmForConditionalGeneration", {}),
    "dia": ("DiaForConditionalGeneration", {}),
    "flava": ("FlavaForPreTraining", {}),
    "dinov3_vit": ("DINOv3ViTModel", {}),
    "fun_asr_nano": ("FunAsrNanoForConditionalGeneration", {}),
    "glm_image": ("GlmImageForConditionalGeneration", {}),
    "granite_docling": ("GraniteDoclingForConditionalGeneration", {}),
    "grounding-dino": ("GroundingDinoModel", {}),
    "groupvit": ("GroupViTModel", {}),
    "higgs_audio_v2": ("HiggsAudioV2ForConditionalGeneration", {}),
    "hubert": ("HubertModel", {}),
    "kyutai_speech_to_text": ("KyutaiSpeechToTextForConditionalGeneration", {}),
    "layoutlm": ("LayoutLMForMaskedLM", {}),
    "layoutlmv3": ("LayoutLMv3Model", {}),
    "lilt": ("LiltModel", {}),
    "lxmert": ("LxmertForPreTraining", {}),
    "markuplm": ("MarkupLMModel", {}),
    "mistral_large4": ("MistralLarge4ForConditionalGeneration", {}),
    "mlcd_vision_model": ("MLCDVisionModel", {}),
    "mm-grounding-dino": ("MMGroundingDinoModel", {}),
    "moonshine": ("MoonshineForConditionalGeneration", {}),
    "moshi": ("MoshiForConditionalGeneration", {"audio_vocab_size": 2048}),
    "muse_glimmer": ("MuseGlimmerForConditionalGeneration", {}),
    "muse_spark": ("MuseSparkForConditionalGeneration", {}),
    "musicgen": ("MusicgenForConditionalGeneration", {}),
    "musicgen_melody": ("MusicgenMelodyForConditionalGeneration", {}),
    "omniasr_ctc": ("OmniASRCTCModel", {}),
    "parakeet_tdt": ("ParakeetForTDT", {}),
    "pe_audio": ("PeAudioModel", {}),
    "pi0": ("PI0ForConditionalGeneration", {}),
    "sam": ("SamModel", {}),
    "sam2_video": ("Sam2VideoModel", {}),
    "sam3": ("Sam3Model", {}),
    "sam3_tracker": ("Sam3TrackerModel", {}),
    "sam_hq": ("SamHQModel", {}),
    "seamless_m4t": ("SeamlessM4TForSpeechToText", {}),
    "seamless_m4t_v2": ("SeamlessM4Tv2ForSpeechToText", {}),
    "speech_to_text": ("Speech2TextForConditionalGeneration", {}),
    "speecht5": ("SpeechT5ForSpeechToText", {}),
    "swin": ("SwinModel", {}),
    "t5gemma2": ("T5Gemma2ForConditionalGeneration", {"encoder": {"mm_tokens_per_image": 49}}),
    "tipsv2": ("Tipsv2Model", {}),
    "tvp": ("TvpModel", {}),
    "udop": ("UdopForConditionalGeneration", {}),
    "vibevoice": ("VibeVoiceForConditionalGeneration", {}),
    "vibevoice_asr": ("VibeVoiceAsrForConditionalGeneration", {}),
    "videoprism": ("VideoPrismClipModel", {}),
    "vilt": ("ViltModel", {}),
    "vision-encoder-decoder": ("VisionEncoderDecoderModel", {"encoder": DONUT, "decoder": MBART}),
    "visual_bert": ("VisualBertForPreTraining", {}),
    "wavlm": ("WavLMModel", {}),
    "wav2vec2-bert": ("Wav2Vec2BertModel", {}),
    "xclip": ("XCLIPModel", {}),
}
# Keys beside the defaults: what changes the structure and not only a size.
VARIED: dict[str, tuple[str, dict[str, Any]]] = {
    "fused clap": ("clap", {"audio_config": {"enable_fusion": True, "fusion_type": "aff_2d"}}),
    "swin with places": ("swin", {"use_absolute_embeddings": True, "qkv_bias": False}),
    "dino of one stage": ("grounding-dino", {"backbone_config": {"model_type": "swin", "embed_dim": 48}}),
    "dino of one step": ("grounding-dino", {"two_stage": False, "query_dim": 8}),
    "deeper masks": ("sam2_video", {"mask_decoder_config": {"num_hidden_layers": 3}, "num_maskmem": 3}),
    "untied flava": ("flava", {"tie_word_embeddings": False, "init_codebook": False}),
    "links of one kind": ("bridgetower", {"share_link_tower_layers": True, "link_tower_type": "scaled_add"}),
    "own linears": ("bridgetower", {"share_cross_modal_transformer_layers": False}),
    "page of words": ("layoutlmv3", {"visual_embed": False, "has_spatial_attention_bias": False}),
    "gated udop": ("udop", {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3}),
    "lxmert without heads": ("lxmert", {"task_qa": False, "task_obj_predict": False, "tie_word_embeddings": False}),
    "basic resnet": ("tvp", {"backbone_config": {"model_type": "resnet", "layer_type": "basic"}}),
    "rotary conformer": ("wav2vec2-bert", {"position_embeddings_type": "rotary"}),
    "dense muse": ("muse_spark", {"text_config": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}}),
    "code as wide as rows": ("csm", {"codec_config": {"vector_quantization_hidden_dimension": 512}}),
    "dino with a gate": ("dinov3_vit", {"use_gated_mlp": True, "num_register_tokens": 4, "key_bias": True}),
    "beit with tables": ("beit", {"use_relative_position_bias": True, "use_mask_token": True}),
    "beit with one table": ("beit", {"use_shared_relative_position_bias": True, "use_mean_pooling": False}),
    "coarse pages": ("granite_docling", {"vision_config": {"use_fine_route": False, "scale_factor": 2}}),
}
MOLMO = {"model_type": "molmo", "hidden_size": 3584, "intermediate_size": 37888, "embedding_size": 152064}
MOLMO |= {"num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "qkv_bias": True}
MOLMO |= {"vocab_size": 152064, "weight_tying": False, "norm_after": False, "attention_layer_norm": False}
QWEN_VL = {"model_type": "qwen", "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32}
QWEN_VL |= {"num_attention_heads": 32, "kv_channels": 128, "no_bias": True, "vocab_size": 151936}
BIGG = {"heads": 16, "image_size": 448, "layers": 48, "mlp_ratio": 4.9231, "output_dim": 4096, "patch_size": 14}
GLM4 = {"model_type": "chatglm", "add_qkv_bias": True, "ffn_hidden_size": 13696, "hidden_size": 4096, "rmsnorm": True}
GLM4 |= {"kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 32}
GLM4 |= {"num_layers": 40, "padded_vocab_size": 151552, "post_layer_norm": True, "add_bias_linear": False}
PHI4_EAR = {"attention_dim": 1024, "attention_heads": 16, "linear_units": 1536, "num_blocks": 24, "kernel_size": 3}
PHI4_EAR |= {"input_size": 80, "time_reduction": 8, "ext_pw_out_channel": 1024, "depthwise_multiplier": 1}
PHI4_EAR |= {"nemo_conv_settings": {"conv_channels": 1024}, "depthwise_seperable_out_channel": 1024}
PHI4_EAR |= {"relative_attention_bias_args": {"t5_bias_max_distance": 500, "type": "t5"}}
PHI4 = {"model_type": "phi4mm", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24}
PHI4 |= {"num_hidden_layers": 32, "num_key_value_heads": 8, "tie_word_embeddings": True, "vocab_size": 200064}
PHI4 |= {"audio_processor": {"name": "cascades", "config": PHI4_EAR}, "speech_lora": {"r": 320}}
PHI4 |= {"embd_layer": {"image_embd_layer": {"crop_size": 448}}, "vision_lora": {"r": 256}}
TURBO, LLAMA1B = "openai/whisper-large-v3-turbo", "meta-llama/Llama-3.2-1B-Instruct"
ULTRAVOX = {"model_type": "ultravox", "audio_model_id": TURBO, "text_model_id": LLAMA1B, "projector_ln_mid": True}
AIM = {"model_type": "aimv2", "hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 12}
AIM |= {"num_hidden_layers": 24, "image_size": 448, "patch_size": 14, "num_channels": 3, "qkv_bias": False}
OVIS = {"model_type": "ovis", "hidden_size": 3584, "llm_config": {"model_type": "qwen2", **QWEN7}}
OVIS |= {"visual_tokenizer_config": {"hidden_stride": 2, "vocab_size": 65536, "backbone_config": AIM}}
WHISPER = {"d_model": 1024, "encoder_layers": 24, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096}
SO400M = {"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 980, "intermediate_size": 4304}
SO400M |= {"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14}
MINICPMO = {"model_type": "minicpmo", **QWEN7, "vocab_size": 151700, "vision_config": SO400M}
MINICPMO |= {"audio_config": WHISPER, "query_num": 64, "drop_vision_last_layer": False}

# Totals that the Hub tells of the checkpoints, or sums of parts that are known alone.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Molmo-7B-D": (MOLMO, 8_021_025_280),
    "Qwen-VL-Chat": ({**QWEN_VL, "visual": {**BIGG, "width": 1664}}, 9_656_935_168),
    "Qwen-7B": (QWEN_VL, 7_721_324_544),
    "glm-4-9b": (GLM4, 9_399_951_360),
    "Phi-4-multimodal with its adapters": (PHI4, 5_574_460_384),
    # Whisper's encoder and Llama 3.2 1B; a norm and three matrices with a norm between them
    "ultravox": (ULTRAVOX, 636_968_960 + 1_235_814_400 + 10_240 + 10_240 * 4_096 + 2_048 + 2_048 * 2_048),
}


def _read(folder: Path, values: dict[str, Any]) -> Model:
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return read_config(file).model


def _total(folder: Path, values: dict[str, Any]) -> int:
    return sum(module_parameters(_read(folder, values)).values())


def _on_meta(kind: str, named: str, values: dict[str, Any]) -> int:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(kind, **copy.deepcopy(values))
    with torch.device("meta"):
        model = getattr(transformers, named)(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", CLASSES)
def test_a_multimodal_class_has_the_parameters_of_transformers(tmp_path: Path, kind: str) -> None:
    named, values = CLASSES[kind]
    assert _total(tmp_path, {"model_type": kind, **values}) == _on_meta(kind, named, values)


@pytest.mark.parametrize("name", VARIED)
def test_a_key_that_changes_the_structure_is_followed(tmp_path: Path, name: str) -> None:
    kind, values = VARIED[name]
    assert _total(tmp_path, {"model_type": kind, **values}) == _on_meta(kind, CLASSES[kind][0], values)


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_with_code_of_their_own_have_the_published_total(tmp_path: Path, name: str) -> None:
    values, total = PUBLISHED[name]
    assert _total(tmp_path, values) == total


def test_parts_of_files_with_code_of_their_own_are_those_of_known_ones(tmp_path: Path) -> None:
    ovis = module_parameters(_read(tmp_path, OVIS))
    assert ovis["llm"] == 7_615_616_512  # Qwen2.5-7B
    assert sum(ovis.values()) == 8_935_282_678  # "8.94B" (AIDC-AI/Ovis2-8B)
    hears = module_parameters(_read(tmp_path, MINICPMO))
    assert hears["audio"] == 307_216_384  # Whisper medium's encoder
    assert hears["audio_projector"] == 1024 * 3584 + 3584 + 3584 * 3584 + 3584


def test_sound_becomes_as_many_rows_as_the_codec_makes(tmp_path: Path) -> None:
    model = _read(tmp_path, {"model_type": "csm"})
    lengths = sequence_lengths(model, Sample(text_tokens=20, audio_s=(8.0,)))
    assert lengths["codes"] == (100,)  # 12.5 in a second
    assert lengths["llm"] == (120,)
    assert lengths["depth"] == (120 * 32,)  # a row for each code
    clap = sequence_lengths(_read(tmp_path, {"model_type": "clap"}), Sample(text_tokens=20, audio_s=(3.0,)))
    assert clap["audio"] == (4096,)  # 256 x 256 in patches of 4 x 4, whatever the clip's length is
    assert clap["audio_stage3"] == (64,)


def test_frames_that_a_model_gives_are_its_speech_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "musicgen"}))
    text = "name: x\nmodel: {hf_config: config.json}\ndata: {text_tokens: 12, speech_tokens: 50}\nbatch: {global: 8}\n"
    text += "precision: bf16\n"
    text += "cluster: {device: h100-sxm, nodes: 1, devices_per_node: 8}\n"
    (tmp_path / "s.yaml").write_text(text)
    scenario = load_scenario(tmp_path / "s.yaml")
    lengths = sequence_lengths(scenario.model, Sample(text_tokens=12, speech_tokens=50))
    assert (lengths["text"], lengths["llm"]) == ((12,), (50,))


def test_pages_become_as_many_rows_as_their_stages_leave(tmp_path: Path) -> None:
    model = _read(tmp_path, {"model_type": "vision-encoder-decoder", "encoder": DONUT, "decoder": MBART})
    lengths = sequence_lengths(model, Sample(text_tokens=100, images=((2560, 1920),)))
    assert lengths["vision"] == (640 * 480,)
    assert lengths["vision_stage3"] == (80 * 60,)
    assert lengths["llm"] == (100,)


def test_a_decoder_that_reads_both_sides_at_once_has_keys_of_both(tmp_path: Path) -> None:
    model = _read(tmp_path, {"model_type": "t5gemma2", **CLASSES["t5gemma2"][1]})
    load = summed_loads(model, [Sample(text_tokens=100, images=((224, 224),))])["llm"]
    assert load.context_tokens == 100 + 49 + 100  # words and image of the encoder, words of its own
    assert load.context_pairs == 100 * 249


REFUSED_KEYS: list[tuple[dict[str, Any], str]] = [
    (
        {"model_type": "clap", "audio_config": {"hidden_size": 512}},
        "audio_config.hidden_size: expected the width of the last stage 768, found 512",
    ),
    (
        {"model_type": "csm", "depth_decoder_config": {"num_codebooks": 8}},
        "depth_decoder_config.num_codebooks: expected num_codebooks of the model 32, found 8",
    ),
    (
        {"model_type": "ultravox", "audio_model_id": TURBO, "text_model_id": "acme/secret-1b"},
        "text_model_id: the sizes of 'acme/secret-1b' are not known here: put its config.json under 'text_config'",
    ),
    (
        {"model_type": "swin", "num_heads": [3, 6, 12]},
        "depths: expected 3 whole numbers from 1 to 2,000, found [2, 2, 6, 2]",
    ),
    (
        {"model_type": "mistral_large4", "text_config": {"indexer_types": ["shared"]}},
        "text_config.indexer_types: layers that read another one's choice of keys are not read",
    ),
    (
        {"model_type": "musicgen", "text_encoder": {"model_type": "bert"}},
        "text_encoder.model_type: expected 't5', found 'bert'",
    ),
    (
        {"model_type": "molmo", "layer_norm_type": "default"},
        "layer_norm_type: 'default' is not supported: its norms are not read",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED_KEYS)
def test_what_a_multimodal_family_cannot_mean_is_refused_by_its_key(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        _read(tmp_path, values)
    assert str(caught.value) == f"{tmp_path / 'config.json'}: {message}"


JUNK: list[Any] = [None, 0, -1, 7, True, "x", [], [1, 2], {"a": 1}, 1.5, 10**12]


@pytest.mark.parametrize("kind", CLASSES)
def test_a_damaged_key_gives_a_model_or_one_sentence(tmp_path: Path, kind: str) -> None:
    """Class defaults with one or two keys of it or of a nested config replaced; further keys change nothing."""
    draw = random.Random(kind)
    for _ in range(12):
        values: dict[str, Any] = {"model_type": kind, **copy.deepcopy(CLASSES[kind][1]), "made_up_key": 3}
        parts = defaults_of(kind).parts
        place, inner = values, kind
        if parts and draw.random() < 0.6:
            key = draw.choice(sorted(parts))
            inner, place = parts[key].kind, values.setdefault(key, {})
        names = sorted(defaults_of(inner).keys) or ["hidden_size"]
        for key in draw.sample(names, min(len(names), draw.choice((1, 2)))):
            place[key] = draw.choice(JUNK)
        try:
            counts = module_parameters(_read(tmp_path, values))
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert all(count >= 0 for count in counts.values())
