"""The families of Hugging Face models by `model_type`: who reads a config of each."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from mmplan.scenario.document import shown
from mmplan.scenario.formats.hf import (
    decoders,
    deepseek_ocr,
    docling,
    dots,
    florence,
    fun_asr,
    fusion,
    gemma_families,
    inkling,
    listeners,
    llava_like,
    minimax,
    moonshine,
    muse,
    nemotron,
    nemotron_speech,
    odd_projectors,
    pages,
    quantising,
    querying,
    qwen3,
    remote,
    remote_more,
    robots,
    sam,
    shrinking,
    speakers,
    t5gemma,
    timm_towers,
    transcribers,
    voices,
    waves,
)
from mmplan.scenario.formats.hf.encoders_alone import ENCODERS
from mmplan.scenario.formats.hf.stacks import STACKS
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import tower_of
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import edge, projector_module
from mmplan.scenario.scenario import Model, ModelModule, TextInput


def plain(config: Fields, name: str) -> Model:
    """One language model."""
    return Model(name=name, modules=(text_module(config),), edges=())


def headless(config: Fields, name: str) -> Model:
    """The language model of a family without its head, as its own configuration class stands for it."""
    module = text_module(config)
    return Model(name=name, modules=(without_head(module),), edges=())


def without_head(module: ModelModule) -> ModelModule:
    turned = module.text.positions if module.text is not None else "rotary"
    return replace(module, kind="text_encoder", text=TextInput(positions=turned))


def minimax_m3(config: Fields, name: str) -> Model:
    return minimax.family(config, name, tower_of(config), text_module(config, "text_config"))


def retrieval(config: Fields, name: str) -> Model:
    """ColPali and its kin: a family's model without head, and one linear that gives each token a short vector."""
    inner = config.part("vlm_config")
    if inner.kind not in FAMILIES:
        raise inner.error("model_type", f"expected a family that is read, found {shown(inner.kind)}")
    model = FAMILIES[inner.kind](inner, name)
    bodies = tuple(without_head(module) if module.kind == "language_model" else module for module in model.modules)
    dims = (model.module("llm").output_width, config.count("embedding_dim"))
    last = projector_module(dims, name="embedding", modality="text")
    return replace(model, modules=(*bodies, last), edges=(*model.edges, edge("llm", "embedding", "input")))


def deciding(config: Fields, name: str) -> Model:
    """JEV: any model without head, and scores of labels, of which those at a few tokens are read."""
    inner = config.part("text_config")
    if inner.kind not in FAMILIES:
        raise inner.error("model_type", f"expected a family that is read, found {shown(inner.kind)}")
    model = FAMILIES[inner.kind](inner, name)
    bodies = tuple(without_head(module) if module.kind == "language_model" else module for module in model.modules)
    width = model.module("llm").output_width
    config.same("hidden_size", width, "the model's width")
    last = projector_module((width, config.count("num_verbalizers")), name="labels", modality="text")
    return replace(model, modules=(*bodies, last), edges=(*model.edges, edge("llm", "labels", "input")))


# Language models that have no class of their own with a head: they stand inside the configs of their families.
PARTS = {
    "cohere_compass_text",
    "cosmos3_edge_text",
    "embedding_gemma2_text",
    "deepseek_ocr2_text",
    "dia_text",
    "kyutai_text",
    "emu3_text_model",
    "ernie4_5_vl_moe_text",
    "glm4v_moe_text",
    "glm4v_text",
    "glm5_next_text",
    "glm_image_text",
    "hy_v4_vl_text",
    "granite_docling_text",
    "glm_ocr_text",
    "granite4_vision_text",
    "hunyuan_vl_text",
    "idefics",
    "kosmos_2_5_text_model",
    "kosmos_2_text_model",
    "mistral_large4_text",
    "mllama_text_model",
    "modernbert",
    "molmo2_text",
    "muse_glimmer_text",
    "muse_spark_text",
    "paddleocr_vl_text",
    "phi4_multimodal",
    "qwen2_5_omni_text",
    "qwen2_5_vl_text",
    "qwen2_vl_text",
    "qwen3_omni_moe_text",
    "qwen3_vl_moe_text",
    "qwen3_vl_text",
    "step3p5",
    "step3p7_text",
    "ultrabert",
    "t5gemma2_text",
    "unlimited_ocr_text",
    "voxtral_realtime_text",
}

FAMILIES: Mapping[str, Callable[[Fields, str], Model]] = {
    **dict.fromkeys(sorted(set(STACKS) - PARTS), plain),
    **dict.fromkeys(sorted(PARTS), headless),
    **ENCODERS,
    "apertus1p5": quantising.apertus,
    "aria": querying.aria,
    "deepseek_vl_hybrid": sam.deepseek_hybrid,
    "got_ocr2": sam.got_ocr,
    "idefics": querying.idefics,
    "kosmos-2": querying.kosmos,
    "kosmos-2.5": querying.kosmos,
    "pp_chart2table": sam.got_ocr,
    "audioflamingo3": listeners.audio_flamingo,
    "blip": decoders.blip,
    "blip-2": querying.blip2,
    "colmodernvbert": retrieval,
    "colpali": retrieval,
    "colqwen2": retrieval,
    "ernie4_5_vl_moe": odd_projectors.ernie,
    "fuyu": odd_projectors.fuyu,
    "granite4_vision": odd_projectors.granite4,
    "hy_v4_vl": odd_projectors.hunyuan4,
    "hunyuan_vl": odd_projectors.hunyuan,
    "lfm3_vl": odd_projectors.lfm3,
    "molmo2": odd_projectors.molmo2,
    "video_llava": odd_projectors.video_llava,
    "chameleon": quantising.chameleon,
    "git": decoders.git,
    "moonshine": transcribers.moonshine,
    "moonshine_streaming": moonshine.streaming,
    "seamless_m4t": transcribers.seamless,
    "seamless_m4t_v2": transcribers.seamless,
    "speech_to_text": transcribers.speech_to_text,
    "speecht5": transcribers.speecht5,
    "fun_asr_nano": fun_asr.nano,
    "glm_image": quantising.glm_image,
    "granite_docling": docling.granite,
    "muse_glimmer": muse.glimmer,
    "muse_spark": muse.spark,
    "t5gemma": t5gemma.t5gemma,
    "t5gemma2": t5gemma.t5gemma2,
    "bark": voices.bark,
    "clvp": voices.clvp,
    "csm": speakers.csm,
    "dia": speakers.dia,
    "higgs_audio_v2": speakers.higgs,
    "kyutai_speech_to_text": speakers.kyutai,
    "moshi": speakers.moshi,
    "musicgen": speakers.musicgen,
    "musicgen_melody": speakers.musicgen,
    "vibevoice": voices.vibevoice,
    "vibevoice_asr": voices.vibevoice_asr,
    "layoutlm": pages.layoutlm,
    "lxmert": fusion.lxmert,
    "nougat": decoders.encoder_decoder,
    "udop": pages.udop,
    "visual_bert": fusion.visual_bert,
    "minicpm_ocr": shrinking.minicpm,
    "minicpmv4_6": shrinking.minicpm,
    "minicpmv4_7": shrinking.minicpm,
    "musicflamingo": listeners.audio_flamingo,
    "pix2struct": decoders.pix2struct,
    "step3p7": shrinking.step3,
    "vision-encoder-decoder": decoders.encoder_decoder,
    "voxtral_realtime": listeners.voxtral_realtime,
    "granite_speech": querying.granite_speech,
    "granite_speech_plus": querying.granite_speech,
    "idefics2": querying.idefics2,
    "instructblip": querying.blip2,
    "instructblipvideo": querying.blip2,
    "phi4_multimodal": querying.phi4_multimodal,
    "aya_vision": llava_like.aya,
    "cohere_compass": qwen3.qwen3_vl,
    "cohere2_vision": llava_like.aya,
    "cosmos3_omni": qwen3.qwen3_vl,
    "deepseek_ocr2": deepseek_ocr.ocr2,
    "deepseek_vl_v2": deepseek_ocr.deepseek_vl_v2,
    "unlimited_ocr": deepseek_ocr.unlimited,
    "deepseek_vl": llava_like.two_linears,
    "embedding_gemma2": gemma_families.embedding_gemma2,
    "encoder-decoder": decoders.words_to_words,
    "exaone4_5": llava_like.qwen_vl,
    "gemma3": llava_like.gemma3,
    "canary": waves.canary,
    "cohere_asr": waves.cohere_asr,
    "cosmos3_edge": odd_projectors.cosmos3_edge,
    "modernvbert": odd_projectors.modernvbert,
    "moss_transcribe_diarize": waves.moss,
    "omniasr": waves.omniasr,
    "speech-encoder-decoder": waves.speech_encoder_decoder,
    "dots3_note": dots.family,
    "emu3": quantising.emu3,
    "fast_vlm": timm_towers.fast_vlm,
    "perception_lm": timm_towers.perception_lm,
    "florence2": florence.florence2,
    "gemma3n": gemma_families.gemma3n,
    "gemma4": gemma_families.gemma4,
    "gemma4_unified": gemma_families.gemma4_unified,
    "glm46v": llava_like.glm4v,
    "glm4v": llava_like.glm4v,
    "glm4v_moe": llava_like.glm4v,
    "glm_ocr": llava_like.glm4v,
    "glm5_next": llava_like.glm4v,
    "glmga": llava_like.glm4v,
    "glmasr": listeners.glm_asr,
    "hyperclovax_vision_v2": llava_like.hyperclovax,
    "idefics3": llava_like.idefics3,
    "inkling2": inkling.second,
    "inkling2_text": inkling.second_alone,
    "inkling_mm_model": inkling.first,
    "internvl": llava_like.internvl,
    "internvl_chat": llava_like.internvl_chat,
    "jev": deciding,
    "janus": llava_like.janus,
    "kimi_k25": llava_like.kimi_k25,
    "kimi_vl": llava_like.kimi_k25,
    "lfm2_vl": llava_like.lfm2,
    "lighton_ocr": llava_like.mistral3,
    "llama4": llava_like.llama4,
    "llava": llava_like.llava,
    "llava_llama": llava_like.original_llava,
    "llava_mistral": llava_like.original_llava,
    "llava_next": llava_like.llava_next,
    "llava_next_video": llava_like.llava_next,
    "llava_onevision": llava_like.llava_next,
    "llava_qwen": llava_like.original_llava,
    "mistral3": llava_like.mistral3,
    "mistral_large4": llava_like.mistral3,
    "mllama": llava_like.mllama,
    "minicpmv": remote.minicpmv,
    "minimax_m3_vl": minimax_m3,
    "phi3_v": remote.phi3_v,
    "pi0": robots.pi0,
    "chatglm": remote_more.chatglm,
    "internlm2": remote_more.internlm2,
    "minicpmo": remote_more.minicpmo,
    "molmo": remote_more.molmo,
    "ovis": remote_more.ovis,
    "phi4mm": remote_more.phi4mm,
    "qwen": remote_more.qwen_vl,
    "ultravbert": odd_projectors.ultravbert,
    "ultravox": remote_more.ultravox,
    "nemo_speechlm": nemotron_speech.speechlm,
    "nemotron_h_omni": nemotron.omni,
    "ovis2": llava_like.ovis2,
    "paddleocr_vl": llava_like.paddle,
    "paligemma": llava_like.paligemma,
    "qianfan_ocr": llava_like.internvl,
    "qwen2_5_omni": qwen3.qwen2_5_omni,
    "qwen2_5_omni_thinker": qwen3.qwen2_5_omni,
    "qwen2_5_vl": llava_like.qwen_vl,
    "qwen2_audio": listeners.qwen2_audio,
    "qwen2_vl": llava_like.qwen_vl,
    "qwen3_asr": listeners.qwen3_asr,
    "qwen3_omni_moe": qwen3.qwen3_omni,
    "qwen3_omni_moe_thinker": qwen3.qwen3_omni,
    "qwen4_exp": qwen3.qwen3_vl,
    "qwen3_5": qwen3.qwen3_vl,
    "qwen3_5_moe": qwen3.qwen3_vl,
    "qwen3_vl": qwen3.qwen3_vl,
    "qwen3_vl_moe": qwen3.qwen3_vl,
    "shieldgemma2": llava_like.gemma3,
    "smolvlm": llava_like.idefics3,
    "video_llama_3": llava_like.two_linears,
    "vipllava": llava_like.vip_llava,
    "voxtral": listeners.voxtral,
}
