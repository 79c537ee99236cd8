"""Modules that several Hugging Face families share: towers, projectors, language models."""

from typing import Any

from mmplan.scenario.formats.hf_defaults import TEXT_DEFAULTS
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import (
    EdgeKind,
    Modality,
    Model,
    ModelEdge,
    ModelModule,
    Projector,
    Transformer,
    VisionInput,
    Vocabulary,
)

MAX_LAYERS = 2_000
SOURCE = "structure: modelling code of transformers 5.24"


def edge(producer: str, consumer: str, kind: EdgeKind) -> ModelEdge:
    return ModelEdge(producer=producer, consumer=consumer, kind=kind)


def chain(name: str, encoder: ModelModule, projector: ModelModule, llm: ModelModule, kind: EdgeKind = "merge") -> Model:
    """encoder -> projector -> language model."""
    edges = (edge(encoder.name, projector.name, "input"), edge(projector.name, llm.name, kind))
    return Model(name=name, modules=(encoder, projector, llm), edges=edges)


def divided(fields: Fields, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise fields.error("num_heads", f"width {hidden} is not a multiple of {heads} heads")
    return hidden // heads


def projector_module(
    name: str, modality: Modality, dims: tuple[int, ...], bias: Any = None, merge: int = 1
) -> ModelModule:
    projector = Projector(dims=dims, merge=merge, bias=bias is not False)
    return ModelModule(name=name, kind="projector", modality=modality, projector=projector, source=SOURCE)


def merger_module(name: str, tower: Fields, hidden: int, width: int, norm: Any) -> ModelModule:
    """Qwen's patch merger: norm on single tokens, then merge^2 tokens joined, two linears."""
    merge = tower.count("spatial_merge_size", most=100) ** 2
    dims = (hidden * merge, hidden * merge, width)
    projector = Projector(dims=dims, merge=merge, norm=norm, norm_before_merge=True)
    return ModelModule(name=name, kind="projector", modality="vision", projector=projector, source=SOURCE)


def vit_blocks(tower: Fields, layers: int, *, first_norm: bool, attention_bias: bool = True) -> Transformer:
    hidden, heads = tower.count("hidden_size"), tower.count("num_attention_heads", "attention_heads")
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(tower, hidden, heads),
        ffn=tower.count("intermediate_size"),
        gated_mlp=False,
        causal=False,
        norm="layer",
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=True,
        norm_first_extra=first_norm,
    )


def qwen25_blocks(tower: Fields) -> Transformer:
    layers = tower.count("depth", most=MAX_LAYERS)
    hidden, heads = tower.count("hidden_size"), tower.count("num_heads")
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(tower, hidden, heads),
        ffn=tower.count("intermediate_size"),
        gated_mlp=True,
        causal=False,
        norm="rms",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        final_norm=False,
        window_tokens=(tower.count("window_size") // tower.count("patch_size")) ** 2 or 1,
        global_layers=tower.indices("fullatt_block_indexes", layers),
    )


def qwen_vision_module(tower: Fields, transformer: Transformer) -> ModelModule:
    vision = VisionInput(
        patch=tower.count("patch_size"),
        channels=tower.count("in_channels", "in_chans"),
        temporal_patch=tower.count("temporal_patch_size"),
    )
    return ModelModule(
        name="vision", kind="vision_encoder", modality="vision", transformer=transformer, vision=vision, source=SOURCE
    )


def whisper_blocks(tower: Fields, window_tokens: int | None) -> Transformer:
    hidden, heads = tower.count("d_model"), tower.count("encoder_attention_heads")
    return Transformer(
        # transformers maps num_hidden_layers onto encoder_layers: where a file has both, the former is built.
        layers=tower.count("num_hidden_layers", "encoder_layers", most=MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(tower, hidden, heads),
        ffn=tower.count("encoder_ffn_dim"),
        gated_mlp=False,
        causal=False,
        norm="layer",
        qkv_bias=True,
        key_bias=False,
        out_bias=True,
        mlp_bias=True,
        window_tokens=window_tokens,
    )


def text_fields(config: Fields, default_type: str) -> Fields:
    """The text config with the defaults of its model_type."""
    text_type = config.inner("text_config", {}).get("model_type") or default_type
    if text_type not in ("llama", "mistral", "qwen2"):
        raise config.error("text_config.model_type", f"expected 'llama', 'mistral' or 'qwen2', found '{text_type}'")
    return config.inner("text_config", {**TEXT_DEFAULTS[text_type], "model_type": text_type})


def language_module(
    config: Fields, text: Fields, name: str, *, cross_layers: tuple[int, ...] = (), table_width: int | None = None
) -> ModelModule:
    """RMSNorm, gated MLP, grouped-query attention; Qwen models have biases on queries, keys and values."""
    hidden, heads = text.count("hidden_size"), text.count("num_attention_heads")
    kv_heads = text.count("num_key_value_heads") if text.get("num_key_value_heads") is not None else heads
    if heads % kv_heads:
        message = f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
        raise text.error("num_key_value_heads", message)
    transformer = Transformer(
        layers=text.count("num_hidden_layers", most=MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=text.count("head_dim") if text.get("head_dim") is not None else divided(text, hidden, heads),
        ffn=text.count("intermediate_size"),
        gated_mlp=True,
        causal=True,
        norm="rms",
        qkv_bias="qwen" in str(text.get("model_type") or config.get("model_type")) or text.flag("attention_bias"),
        out_bias=text.flag("attention_bias"),
        mlp_bias=text.flag("mlp_bias"),
        cross_layers=cross_layers,
        cross_width=hidden if cross_layers else None,
    )
    tied = config.flag("tie_word_embeddings") or text.flag("tie_word_embeddings")
    modality: Modality = "text" if table_width is None else "speech"
    vocabulary = Vocabulary(size=text.count("vocab_size"), tied=tied, width=table_width)
    return ModelModule(
        name=name,
        kind="language_model",
        modality=modality,
        transformer=transformer,
        vocabulary=vocabulary,
        source=SOURCE,
    )
