"""Encoders without a language model: CLIP and SigLIP with both towers, Whisper's encoder and decoder, single towers."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from mmplan.scenario.formats.hf.ears import EARS, whisper
from mmplan.scenario.formats.hf.towers import TOWERS, tower_of
from mmplan.scenario.formats.hf.vit import BIASES
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import SOURCE, divided, edge, projector_module
from mmplan.scenario.scenario import Model, ModelModule, TextInput, Transformer, Vocabulary


def clip(config: Fields, name: str) -> Model:
    """CLIP: the class token and the last text token pass one linear each; the temperature is stored."""
    vision, text = tower_of(config), _text_tower(config.part("text_config"), causal=True)
    assert vision.vision is not None
    vision = replace(vision, vision=replace(vision.vision, keep_class_token=True))
    width = config.count("projection_dim")
    seen = projector_module((vision.output_width, width), name="vision_projector", bias=False)
    said = projector_module((text.output_width, width), name="text_projector", modality="text", bias=False, stored=1)
    edges = (edge("vision", "vision_projector", "input"), edge("text", "text_projector", "input"))
    return Model(name=name, modules=(vision, seen, text, said), edges=edges)


def siglip(config: Fields, name: str) -> Model:
    """SigLIP: a pooling head on the images, one linear on the text; temperature and bias are stored."""
    vision, fields = tower_of(config), config.part("text_config")
    text = _text_tower(fields, causal=False)
    width = fields.optional("projection_size") or text.output_width
    said = projector_module((text.output_width, width), name="text_projector", modality="text", stored=2)
    return Model(name=name, modules=(vision, text, said), edges=(edge("text", "text_projector", "input"),))


def _text_tower(text: Fields, *, causal: bool) -> ModelModule:
    hidden, heads = text.count("hidden_size"), text.count("num_attention_heads")
    shape = Transformer(
        layers=text.layers(),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(text, hidden, heads),
        ffn=text.count("intermediate_size"),
        gated_mlp=False,
        causal=causal,
        norm="layer",
        **BIASES,
    )
    return ModelModule(
        name="text",
        kind="text_encoder",
        modality="text",
        transformer=shape,
        vocabulary=Vocabulary(size=text.count("vocab_size")),
        text=TextInput(tokens=text.count("max_position_embeddings"), positions="learned"),
        source=SOURCE,
    )


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
    "clip_vision_model",
    "cosmos3_edge_vision",
    "dinov2",
    "glmasr_encoder",
    "idefics3_vision",
    "intern_vit_6b",
    "internvl_vision",
    "kimi_k25_vision",
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
    "clip": clip,
    "siglip": siglip,
    "siglip2": siglip,
    "whisper": whisper_model,
}
