"""Language models of Hugging Face configs: what each `model_type` adds to a LLaMA-like block."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from mmplan.scenario.document import listed, shown
from mmplan.scenario.formats.hf.text_defaults import DEFAULTS
from mmplan.scenario.formats.hf_defaults import TEXT_DEFAULTS
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import language_module
from mmplan.scenario.scenario import Mla, ModelModule, Moe, Transformer, Vocabulary

MAX_EXPERTS = 100_000


def text_module(config: Fields, default_type: str, *, tied: bool | None = None) -> ModelModule:
    """The language model `llm` of `text_config`, or of the config itself where that is missing.

    Args:
        default_type: `model_type` of a text config that names none.
        tied: whether head and token table share a matrix where the config does not say.

    Raises:
        InputError: an unknown model_type, or a size that is missing or impossible.
    """
    nested = config.inner("text_config", {}, flat=True)
    kind = nested.get("model_type") if nested.path else default_type
    kind = kind or default_type
    if kind not in VARIANTS:
        raise nested.error("model_type", f"expected {listed(VARIANTS, 40)}, found {shown(kind)}")
    defaults = {**{**TEXT_DEFAULTS, **DEFAULTS}[kind], "model_type": kind}
    text = replace(nested, defaults=defaults)
    module = language_module(config, text, "llm")
    assert module.transformer is not None and module.vocabulary is not None
    shape = VARIANTS[kind](text, replace(module.transformer, qkv_bias=_has_qkv_bias(kind, text)))
    vocabulary = Vocabulary(size=module.vocabulary.size, tied=_is_tied(config, text, tied))
    return replace(module, transformer=shape, vocabulary=vocabulary)


def _has_qkv_bias(kind: str, text: Fields) -> bool:
    return kind == "qwen2" or text.flag("attention_bias")


def _is_tied(config: Fields, text: Fields, default: bool | None) -> bool:
    """The outer config decides; where it is silent the class's default does, or without one the text config."""
    if config.values.get("tie_word_embeddings") is None and default is not None:
        return default
    return config.flag("tie_word_embeddings") or (default is None and text.flag("tie_word_embeddings"))


def _plain(text: Fields, shape: Transformer) -> Transformer:
    return shape


def _qwen3(text: Fields, shape: Transformer) -> Transformer:
    """Norms on queries and keys, and experts where the config has them."""
    shape = replace(shape, qk_norm=True)
    if text.get("num_experts") is None:
        return shape
    scoring = "softmax" if text.flag("norm_topk_prob") else "softmax_all"
    moe = Moe(
        experts=text.count("num_experts", most=MAX_EXPERTS),
        topk=_topk(text, "num_experts"),
        expert_ffn=text.count("moe_intermediate_size"),
        first_dense=_leading_dense(text, shape.layers),
        every=text.count("decoder_sparse_step", most=2_000),
        scoring="softmax" if scoring == "softmax" else "softmax_all",
    )
    return replace(shape, moe=moe)


def _leading_dense(text: Fields, layers: int) -> int:
    """`mlp_only_layers` as a number of leading layers."""
    if not text.get("mlp_only_layers"):
        return 0
    dense = text.indices("mlp_only_layers", layers)
    if dense != tuple(range(len(dense))):
        raise text.error("mlp_only_layers", f"expected the first layers, found {', '.join(map(str, dense[:8]))}")
    return len(dense)


def _mixtral(text: Fields, shape: Transformer) -> Transformer:
    experts = text.count("num_local_experts", most=MAX_EXPERTS)
    return replace(shape, moe=Moe(experts=experts, topk=_topk(text, "num_local_experts"), expert_ffn=shape.ffn))


def _deepseek(text: Fields, shape: Transformer) -> Transformer:
    """Latent attention, sigmoid router, shared experts. The predictor of further tokens (MTP) is left out."""
    mla = Mla(
        q_lora=text.count("q_lora_rank") if text.values.get("q_lora_rank", 0) is not None else None,  # null: none
        kv_lora=text.count("kv_lora_rank"),
        qk_nope=text.count("qk_nope_head_dim"),
        qk_rope=text.count("qk_rope_head_dim"),
        v_dim=text.count("v_head_dim"),
    )
    return replace(shape, mla=mla, moe=_deepseek_experts(text, shape.layers), kv_heads=shape.heads)


def _deepseek_experts(text: Fields, layers: int) -> Moe | None:
    first_dense = text.get("first_k_dense_replace") or 0
    if isinstance(first_dense, bool) or not isinstance(first_dense, int) or first_dense < 0:
        raise text.error("first_k_dense_replace", f"expected a whole number from 0 up, found {shown(first_dense)}")
    if first_dense >= layers:
        return None
    width, shared = text.count("moe_intermediate_size"), text.get("n_shared_experts")
    return Moe(
        experts=text.count("n_routed_experts", most=MAX_EXPERTS),
        topk=_topk(text, "n_routed_experts"),
        expert_ffn=width,
        shared_ffn=width * text.count("n_shared_experts", most=1_000) if shared else 0,
        first_dense=first_dense,
        scoring="sigmoid" if text.flag("norm_topk_prob") else "sigmoid_plain",
    )


def _glm4_moe(text: Fields, shape: Transformer) -> Transformer:
    """Biases on queries, keys and values only."""
    return replace(shape, out_bias=False, moe=_deepseek_experts(text, shape.layers))


def _gemma3(text: Fields, shape: Transformer) -> Transformer:
    """Norms on both sides, five sliding layers for each full one. Image tokens see each other both ways in the model,
    here they are causal."""
    full = _full_layers(text, shape.layers, default_interval=6)
    return replace(
        shape,
        qk_norm=True,
        post_norms=True,
        activation="gelu",
        window_tokens=text.count("sliding_window"),
        sliding=True,
        global_layers=full,
    )


def _full_layers(text: Fields, layers: int, default_interval: int) -> tuple[int, ...]:
    """Layers with attention to all tokens: `layer_types`, else every so many."""
    types = text.get("layer_types")
    if types is None:
        interval = text.get("sliding_window_pattern") or default_interval
        return tuple(index for index in range(layers) if (index + 1) % interval == 0)
    if not isinstance(types, list) or len(types) != layers:
        raise text.error("layer_types", f"expected a list of {layers} names, found {shown(types)}")
    return tuple(index for index, kind in enumerate(types) if kind == "full_attention")


def _llama4(text: Fields, shape: Transformer) -> Transformer:
    """One expert of each token and a shared one; attention in blocks, but for each fourth layer. The norms on queries
    and keys have no weights and are left out."""
    width, step = shape.ffn, text.count("interleave_moe_layer_step", most=2_000)
    interval = text.count("no_rope_layer_interval", most=2_000)
    moe = Moe(
        experts=text.count("num_local_experts", most=MAX_EXPERTS),
        topk=_topk(text, "num_local_experts"),
        expert_ffn=width,
        shared_ffn=width,
        every=step,
        scoring="sigmoid_plain",
    )
    return replace(
        shape,
        ffn=text.count("intermediate_size_mlp"),
        moe=moe,
        window_tokens=text.count("attention_chunk_size", most=100_000_000),
        global_layers=tuple(index for index in range(shape.layers) if (index + 1) % interval == 0),
    )


def _topk(text: Fields, experts: str) -> int:
    topk, most = text.count("num_experts_per_tok"), text.count(experts, most=MAX_EXPERTS)
    if topk > most:
        raise text.error("num_experts_per_tok", f"{topk} experts of a token are more than {experts} = {most}")
    return topk


VARIANTS: Mapping[str, Callable[[Fields, Transformer], Transformer]] = {
    "deepseek_v3": _deepseek,
    "gemma3_text": _gemma3,
    "glm4v_moe_text": _glm4_moe,
    "kimi_k2": _deepseek,
    "llama": _plain,
    "llama4_text": _llama4,
    "mistral": _plain,
    "mixtral": _mixtral,
    "qwen2": _plain,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3,
    "qwen3_vl_moe_text": _qwen3,
    "qwen3_vl_text": _qwen3,
}
