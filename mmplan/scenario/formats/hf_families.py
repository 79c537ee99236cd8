"""One function per family of Hugging Face multimodal models: config -> modules and edges.

Structure follows the modelling code of transformers 5.24; what it has beyond our modules is said at each function.
"""

from mmplan.scenario.formats.hf.mistral3 import pixtral
from mmplan.scenario.formats.hf_defaults import AUDIO_DEFAULTS, TEXT_DEFAULTS, VISION_DEFAULTS
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import (
    MAX_LAYERS,
    SOURCE,
    chain,
    divided,
    edge,
    language_module,
    merger_module,
    projector_module,
    qwen25_blocks,
    qwen_vision_module,
    text_fields,
    vit_blocks,
    whisper_blocks,
)
from mmplan.scenario.scenario import AudioInput, Model, ModelModule, Transformer, VisionInput


def llava(config: Fields, name: str) -> Model:
    """CLIP tower, two linears, LLaMA-like model. The tower's last block runs though LLaVA reads the one before it."""
    if not {"text_config", "vision_config"} & set(config.values):
        raise config.error(
            "text_config", "this key is missing (files of the original LLaVA repository have another form)"
        )
    vision_type = config.inner("vision_config", {}).get("model_type") or "clip_vision_model"
    if vision_type == "pixtral":
        return pixtral(config, name)
    if vision_type != "clip_vision_model":
        raise config.error(
            "vision_config.model_type", f"expected 'clip_vision_model' or 'pixtral', found '{vision_type}'"
        )
    tower = config.inner("vision_config", VISION_DEFAULTS["clip_vision_model"])
    keep_class = config.get("vision_feature_select_strategy") == "full"
    vision = ModelModule(
        name="vision",
        kind="vision_encoder",
        modality="vision",
        transformer=vit_blocks(tower, tower.count("num_hidden_layers", most=MAX_LAYERS), first_norm=True),
        vision=VisionInput(
            patch=tower.count("patch_size"),
            channels=tower.count("num_channels"),
            image_size=tower.count("image_size"),
            class_token=True,
            keep_class_token=keep_class,
            learned_positions=True,
        ),
        source=SOURCE,
    )
    llm = language_module(config, text_fields(config, "llama"), "llm")
    width = llm.output_width
    projector = projector_module(
        "projector", "vision", (vision.output_width, width, width), bias=config.get("multimodal_projector_bias")
    )
    return chain(name, vision, projector, llm)


def qwen2_vl(config: Fields, name: str) -> Model:
    """Native resolution, LayerNorm, plain MLP; the merger joins 2 x 2 patches."""
    tower = config.inner("vision_config", VISION_DEFAULTS["qwen2_vl_vision"])
    hidden, heads = tower.count("embed_dim"), tower.count("num_heads")
    transformer = Transformer(
        layers=tower.count("depth", most=MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(tower, hidden, heads),
        ffn=hidden * tower.count("mlp_ratio", most=100),
        gated_mlp=False,
        causal=False,
        norm="layer",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        final_norm=False,
    )
    vision = qwen_vision_module(tower, transformer)
    llm = language_module(config, config.inner("text_config", TEXT_DEFAULTS["qwen2_vl_text"], flat=True), "llm")
    return chain(name, vision, merger_module("projector", tower, hidden, tower.count("hidden_size"), "layer"), llm)


def qwen2_5_vl(config: Fields, name: str) -> Model:
    """Native resolution, RMSNorm, gated MLP, attention in windows except in a few layers."""
    tower = config.inner("vision_config", VISION_DEFAULTS["qwen2_5_vl_vision"])
    vision = qwen_vision_module(tower, qwen25_blocks(tower))
    llm = language_module(config, config.inner("text_config", TEXT_DEFAULTS["qwen2_5_vl_text"], flat=True), "llm")
    projector = merger_module("projector", tower, vision.output_width, tower.count("out_hidden_size"), "rms")
    return chain(name, vision, projector, llm)


def mllama(config: Fields, name: str) -> Model:
    """Llama 3.2 Vision: tiles attend jointly, the text model's cross layers read the projected image tokens.

    Left out: scalar gates, norms on the cross layers' queries and keys, tables of tile positions, the 8 extra rows of
    the token table, and the five intermediate outputs that the projector also reads (it has 6 x the width there).
    """
    tower = config.inner("vision_config", VISION_DEFAULTS["mllama_vision_model"])
    layers = tower.count("num_hidden_layers", most=MAX_LAYERS) + tower.count("num_global_layers", most=MAX_LAYERS)
    tiles = tower.count("max_num_tiles", most=1_000)
    vision = ModelModule(
        name="vision",
        kind="vision_encoder",
        modality="vision",
        transformer=vit_blocks(tower, layers, first_norm=True, attention_bias=False),
        vision=VisionInput(
            patch=tower.count("patch_size"),
            channels=tower.count("num_channels"),
            image_size=tower.count("image_size"),
            class_token=True,
            keep_class_token=True,
            learned_positions=True,
            tiles=tiles,
            joint_tiles=tiles > 1,
        ),
        source=SOURCE,
    )
    text = config.inner("text_config", TEXT_DEFAULTS["mllama_text_model"])
    count = text.count("num_hidden_layers", most=MAX_LAYERS)
    llm = language_module(config, text, "llm", cross_layers=text.indices("cross_attention_layers", count))
    projector = projector_module("projector", "vision", (vision.output_width, llm.output_width))
    return chain(name, vision, projector, llm, kind="cross_attention")


def qwen2_audio(config: Fields, name: str) -> Model:
    """Whisper-large-v3 encoder with stored positions, pairs of tokens averaged, one linear."""
    tower = config.inner("audio_config", AUDIO_DEFAULTS["qwen2_audio_encoder"])
    positions = tower.count("max_source_positions")
    audio = ModelModule(
        name="audio",
        kind="audio_encoder",
        modality="audio",
        transformer=whisper_blocks(tower, window_tokens=None),
        # 100 frames a second, two frames a token.
        audio=AudioInput(mel_bins=tower.count("num_mel_bins"), pad_s=positions / 50, pool=2, positions=positions),
        source=SOURCE,
    )
    llm = language_module(config, text_fields(config, "qwen2"), "llm")
    return chain(name, audio, projector_module("projector", "audio", (audio.output_width, llm.output_width)), llm)


def qwen2_5_omni(config: Fields, name: str) -> Model:
    """Two encoders and a thinker; the talker reads the thinker's last hidden states.

    Left out: the two embeddings that mark the ends of audio, and token2wav, which is not trained with the rest.
    """
    thinker = config.inner("thinker_config", {}, flat=True)
    tower = thinker.inner("vision_config", VISION_DEFAULTS["qwen2_5_omni_vision_encoder"])
    vision = qwen_vision_module(tower, qwen25_blocks(tower))
    vision_projector = merger_module(
        "vision_projector", tower, vision.output_width, tower.count("out_hidden_size"), "rms"
    )
    ear = thinker.inner("audio_config", AUDIO_DEFAULTS["qwen2_5_omni_audio_encoder"])
    audio = ModelModule(
        name="audio",
        kind="audio_encoder",
        modality="audio",
        # The encoder cuts the mel frames into chunks of 2 * n_window, which the stride 2 turns into n_window tokens.
        transformer=whisper_blocks(ear, window_tokens=ear.count("n_window")),
        audio=AudioInput(mel_bins=ear.count("num_mel_bins"), pad_s=None, pool=2),
        source=SOURCE,
    )
    audio_projector = projector_module("audio_projector", "audio", (audio.output_width, ear.count("output_dim")))
    text = thinker.inner("text_config", TEXT_DEFAULTS["qwen2_5_omni_text"])
    llm = language_module(thinker, text, "llm")
    edges = [
        edge("vision", "vision_projector", "input"),
        edge("vision_projector", "llm", "merge"),
        edge("audio", "audio_projector", "input"),
        edge("audio_projector", "llm", "merge"),
    ]
    modules = [vision, vision_projector, audio, audio_projector, llm]
    if config.get("enable_audio_output") is not False and config.values.get("talker_config") is not None:
        talker = config.inner("talker_config", TEXT_DEFAULTS["qwen2_5_omni_talker"])
        width = talker.count("embedding_size")
        if width != llm.output_width:
            message = f"expected the thinker's hidden size {llm.output_width}, found {width}"
            raise talker.error("embedding_size", message)
        modules.append(language_module(talker, talker, "talker", table_width=width))
        edges.append(edge("llm", "talker", "hidden"))
    return Model(name=name, modules=tuple(modules), edges=tuple(edges))
