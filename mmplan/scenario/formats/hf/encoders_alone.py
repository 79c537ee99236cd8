"""Encoders without a language model: pairs that a loss compares, BERTs that see, single towers. And Whisper."""

from collections.abc import Callable, Mapping

from mmplan.scenario.formats.hf import (
    edgetam,
    fusion,
    grounding,
    nemotron_speech,
    odd_pairs,
    pages,
    pairs,
    perception,
    sam3,
    sam_family,
    swin,
    transcribers,
    waves,
)
from mmplan.scenario.formats.hf.ears import EARS, whisper
from mmplan.scenario.formats.hf.towers import TOWERS
from mmplan.scenario.formats.hf.vit import BIASES
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import SOURCE, divided, edge
from mmplan.scenario.scenario import Model, ModelModule, TextInput, Transformer, Vocabulary


def whisper_model(config: Fields, name: str) -> Model:
    """Encoder and decoder; each decoder layer attends to its own tokens and then to the clip's."""
    audio = whisper(config)
    hidden, heads = config.count("d_model"), config.count("decoder_attention_heads")
    layers = config.layers("decoder_layers")
    shape = Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(config, hidden, heads),
        ffn=config.count("decoder_ffn_dim"),
        gated_mlp=False,
        causal=True,
        norm="layer",
        key_bias=False,
        cross_layers=tuple(range(layers)),
        cross_width=hidden,
        cross_also=True,
        **BIASES,
    )
    decoder = ModelModule(
        name="llm",
        kind="language_model",
        modality="text",
        transformer=shape,
        vocabulary=Vocabulary(size=config.count("vocab_size"), tied=config.flag("tie_word_embeddings")),
        text=TextInput(positions="none"),
        stored=config.count("max_target_positions", most=100_000_000) * hidden,
        source=SOURCE,
    )
    return Model(name=name, modules=(audio, decoder), edges=(edge("audio", "llm", "cross_attention"),))


def _alone(build: Callable[[Fields], ModelModule]) -> Callable[[Fields, str], Model]:
    def read(config: Fields, name: str) -> Model:
        return Model(name=name, modules=(build(config),), edges=())

    return read


# Towers with a model class of their own; the others stand inside the configs of their families alone.
_ALONE = (
    "audioflamingo3_encoder",
    "beit",
    "clip_vision_model",
    "cosmos3_edge_vision",
    "dinov2",
    "dinov2_with_registers",
    "dinov3_vit",
    "glmasr_encoder",
    "idefics3_vision",
    "intern_vit_6b",
    "internvl_vision",
    "kimi_k25_vision",
    "mlcd_vision_model",
    "pixtral",
    "qianfan_ocr_vision",
    "qwen2_audio_encoder",
    "qwen3_asr_encoder",
    "siglip2_vision_model",
    "siglip_vision_model",
    "smolvlm_vision",
    "video_llama_3_vision",
    "voxtral_encoder",
)
ENCODERS: Mapping[str, Callable[[Fields, str], Model]] = {
    **{kind: _alone({**TOWERS, **EARS}[kind]) for kind in _ALONE},
    "aimv2": odd_pairs.aimv2,
    "align": pairs.align,
    "altclip": pairs.clip,
    "bridgetower": fusion.bridgetower,
    "bros": pages.bros,
    "chinese_clip": pairs.clip,
    "clap": swin.clap,
    "clip": pairs.clip,
    "clipseg": pairs.clip,
    "donut-swin": swin.alone,
    "edgetam": edgetam.image,
    "edgetam_video": edgetam.video,
    "edgetam_vision_model": edgetam.vision_alone,
    "flava": fusion.flava,
    "grounding-dino": grounding.grounding_dino,
    "groupvit": odd_pairs.groupvit,
    "layoutlmv3": pages.layoutlmv3,
    "lilt": pages.lilt,
    "markuplm": pages.markuplm,
    "metaclip_2": pairs.clip,
    "mm-grounding-dino": grounding.grounding_dino,
    "nemotron3_5_transcribe_audio": nemotron_speech.transcribing_encoder,
    "nemotron3_diarization": nemotron_speech.diarization,
    "owlv2": pairs.clip,
    "owlvit": pairs.clip,
    "parakeet_ctc": transcribers.parakeet_head,
    "granite_speech5_ctc": transcribers.granite5,
    "lasr_ctc": transcribers.lasr,
    "nemotron3_5_asr": transcribers.parakeet_head,
    "nemotron_asr_streaming": transcribers.parakeet_head,
    "parakeet_rnnt": transcribers.parakeet_head,
    "parakeet_tdt": transcribers.parakeet_head,
    "pe_audio": perception.audio,
    "pe_audio_encoder": perception.alone,
    "pe_audio_video": perception.audio_video,
    "pe_audio_video_encoder": perception.alone,
    "pe_video": perception.video,
    "pe_video_encoder": perception.alone,
    "sam": sam_family.segmenting,
    "sam2": sam_family.sam2,
    "sam2_video": sam_family.sam2_video,
    "sam2_vision_model": sam_family.sam2_vision,
    "sam3": sam3.sam3,
    "sam3_lite_text": sam3.sam3,
    "sam3_tracker": sam3.tracker,
    "sam3_tracker_video": sam3.tracker_video,
    "sam3_video": sam3.video,
    "sam3_vision_model": sam3.vision_alone,
    "sam_hq": sam_family.segmenting,
    "siglip": pairs.siglip,
    "siglip2": pairs.siglip,
    "swin": swin.alone,
    "tipsv2": odd_pairs.tipsv2,
    "tvp": fusion.tvp,
    "videoprism": odd_pairs.videoprism,
    "vilt": fusion.vilt,
    "xclip": odd_pairs.xclip,
    "vision-text-dual-encoder": pairs.dual_encoder,
    "hubert": waves.alone,
    "omniasr_ctc": waves.alone,
    "wav2vec2": waves.alone,
    "wavlm": waves.alone,
    "wav2vec2-bert": transcribers.wav2vec_bert,
    "whisper": whisper_model,
}
