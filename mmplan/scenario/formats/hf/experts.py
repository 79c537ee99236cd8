"""Experts of language models, by the keys that their configuration classes use."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from mmplan.scenario.attention_forms import Mla
from mmplan.scenario.formats.hf.blocks_by_layer import each, experts_in
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import Moe, Transformer

MAX_EXPERTS = 100_000
Scoring = Literal["softmax", "softmax_all", "sigmoid", "sigmoid_plain"]


def moe_of(text: Fields, experts: str, width: int, *, topk: str = "num_experts_per_tok", scoring: Scoring) -> Moe:
    """Experts as many as the key `experts` says, each `width` wide."""
    count, chosen = text.count(experts, most=MAX_EXPERTS), text.count(topk, most=MAX_EXPERTS)
    if chosen > count:
        raise text.error(topk, f"{chosen} experts of a token are more than {experts} = {count}")
    return Moe(experts=count, topk=chosen, expert_ffn=width, scoring=scoring)


def softmax_of(text: Fields) -> Scoring:
    return "softmax" if text.flag("norm_topk_prob") else "softmax_all"


def qwen_experts(text: Fields, shape: Transformer) -> Transformer:
    """Experts in every `decoder_sparse_step`-th layer but `mlp_only_layers` (Qwen2-MoE to Qwen3-Omni)."""
    step = text.optional("decoder_sparse_step", most=2_000) or 1
    dense = text.indices("mlp_only_layers", shape.layers) if text.get("mlp_only_layers") else ()
    if text.optional("num_experts", least=0) in (None, 0):
        return shape
    layers = [index for index in range(shape.layers) if index not in dense and (index + 1) % step == 0]
    return experts_in(shape, _qwen_moe(text), layers)


def qwen_shared(text: Fields, shape: Transformer) -> Transformer:
    """The same beside an MLP that all tokens pass, opened by one number of each token."""
    width = text.count("shared_expert_intermediate_size")

    def block(index: int, plain: Transformer) -> Transformer:
        if plain.moe is None or not plain.moe.in_layer(index):
            return replace(plain, moe=None)
        return replace(plain, moe=replace(plain.moe, shared_ffn=width, shared_gate=True, first_dense=0, every=1))

    return each(qwen_experts(text, shape), block)


def _qwen_moe(text: Fields) -> Moe:
    return moe_of(text, "num_experts", text.count("moe_intermediate_size"), scoring=softmax_of(text))


def mixtral_experts(text: Fields, shape: Transformer) -> Transformer:
    return replace(shape, moe=moe_of(text, "num_local_experts", shape.ffn, scoring="softmax"))


def deepseek_experts(text: Fields, shape: Transformer) -> Transformer:
    """DeepSeekMoE: dense layers first, then shared experts beside routed ones, scored by sigmoids (V3, GLM-4.5)."""
    first = text.optional("first_k_dense_replace", least=0, most=1_000_000) or 0
    step = text.optional("moe_layer_freq", most=2_000) or 1 if text.kind == "kimi_k2" else 1
    layers = [index for index in range(first, shape.layers) if index % step == 0]
    width, shared = text.count("moe_intermediate_size"), text.optional("n_shared_experts", least=0, most=1_000) or 0
    scoring: Scoring = "sigmoid" if text.flag("norm_topk_prob") else "sigmoid_plain"
    if text.kind == "deepseek_v2":
        scoring = softmax_of(text)
    moe = replace(moe_of(text, "n_routed_experts", width, scoring=scoring), shared_ffn=width * shared)
    return experts_in(shape, moe, layers)


def latent_attention(text: Fields, shape: Transformer) -> Transformer:
    """Multi-head latent attention of DeepSeek-V2 and V3."""
    mla = Mla(
        q_lora=text.optional("q_lora_rank"),
        kv_lora=text.count("kv_lora_rank"),
        qk_nope=text.count("qk_nope_head_dim"),
        qk_rope=text.count("qk_rope_head_dim", least=0),
        v_dim=text.count("v_head_dim"),
    )
    if mla.qk_rope % 2:
        raise text.error("qk_rope_head_dim", f"rotary positions need an even width, found {mla.qk_rope}")
    return replace(shape, mla=mla, kv_heads=shape.heads)


def llama4_experts(text: Fields, shape: Transformer) -> Transformer:
    """One expert of each token and a shared one in some layers; the others have a wider MLP."""
    listed = text.get("moe_layers")
    if listed is None:
        step = text.count("interleave_moe_layer_step", most=2_000)
        layers: Sequence[int] = range(step - 1, shape.layers, step)
    else:
        layers = text.indices("moe_layers", shape.layers)
    moe = replace(moe_of(text, "num_local_experts", shape.ffn, scoring="sigmoid_plain"), shared_ffn=shape.ffn)
    return experts_in(replace(shape, ffn=text.count("intermediate_size_mlp")), moe, layers)


def ernie_experts(text: Fields, shape: Transformer) -> Transformer:
    """ERNIE 4.5: shared experts beside routed ones, whose router keeps a bias for each."""
    first = text.optional("moe_layer_start_index", least=0) or 0
    last = text.optional("moe_layer_end_index", least=-1)
    step = text.optional("moe_layer_interval", most=2_000) or 1
    last = shape.layers - 1 if last is None or last == -1 else last
    layers = [index for index in range(shape.layers) if (index + 1) % step == 0 and first <= index <= last]
    width = text.count("moe_intermediate_size")
    shared = text.optional("moe_num_shared_experts", least=0, most=1_000) or 0
    moe = moe_of(text, "moe_num_experts", width, topk="moe_k", scoring="softmax")

    def block(index: int, plain: Transformer) -> Transformer:
        if plain.moe is None or not plain.moe.in_layer(index):
            return replace(plain, moe=None)
        return replace(plain, moe=replace(plain.moe, first_dense=0, every=1), stored=plain.stored + moe.experts)

    return each(experts_in(shape, replace(moe, shared_ffn=width * shared), layers), block)


def ernie_vl_experts(text: Fields, shape: Transformer) -> Transformer:
    """ERNIE 4.5 VL: a set of experts for words and one for image tokens, shared experts for both. All tokens are priced
    in the first set, the second one's numbers are kept whole."""
    usual = text.get("moe_intermediate_size") is None
    words, images = (1536, 512) if usual else text.numbers("moe_intermediate_size", count=2)
    moe = moe_of(text, "moe_num_experts", words, topk="moe_k", scoring="softmax")
    shared = text.optional("moe_num_shared_experts", least=0, most=1_000) or 0
    second = moe.experts * (3 * shape.hidden * images + shape.hidden + 1) + moe.experts
    text.log.notes.append("experts of image tokens: weights whole on every rank, work as that of the experts of words")
    layers = sparse_layers(text, shape.layers, first=1)
    stack = experts_in(shape, replace(moe, shared_ffn=words * shared), layers)
    return each(
        stack,
        lambda index, block: (
            replace(block, stored=second, moe=replace(moe, shared_ffn=words * shared))
            if index in layers
            else replace(block, moe=None)
        ),
    )


def ocr_experts(text: Fields, shape: Transformer) -> Transformer:
    """DeepSeek-OCR: `mlp_layer_types`, else dense layers first; softmax over routed experts beside shared ones."""
    first = text.optional("first_k_dense_replace", least=0, most=1_000_000)
    layers = sparse_layers(text, shape.layers, first=1 if first is None else first)
    shape = replace(shape, head_dim=shape.hidden // shape.heads)  # whatever `head_dim` says
    width, shared = text.count("moe_intermediate_size"), text.optional("n_shared_experts", least=0, most=1_000) or 0
    moe = moe_of(text, "n_routed_experts", width, scoring="softmax_all")
    return experts_in(shape, replace(moe, shared_ffn=width * shared), layers)


def gpt_oss_experts(text: Fields, shape: Transformer) -> Transformer:
    """Biases in router and experts, and one sink for each head."""
    moe = moe_of(text, "num_local_experts", shape.ffn, scoring="softmax")
    biases = moe.experts * (2 * shape.ffn + shape.hidden)
    return replace(shape, moe=replace(moe, router_bias=True), stored=shape.stored + biases + shape.heads)


def granite_experts(text: Fields, shape: Transformer) -> Transformer:
    shared = text.optional("shared_intermediate_size", least=0) or 0
    moe = moe_of(text, "num_local_experts", shape.ffn, scoring="softmax")
    return replace(shape, moe=replace(moe, shared_ffn=shared))


def aria_experts(text: Fields, shape: Transformer) -> Transformer:
    """`intermediate_size` is that of an expert, and of each shared one."""
    shared = text.count("moe_num_shared_experts", most=1_000)
    moe = moe_of(text, "moe_num_experts", shape.ffn, topk="moe_topk", scoring="softmax")
    return replace(shape, moe=replace(moe, shared_ffn=shape.ffn * shared))


def step_experts(text: Fields, shape: Transformer) -> Transformer:
    """Step 3.7: `mlp_layer_types`, else the first three layers dense; one shared expert."""
    layers = sparse_layers(text, shape.layers, first=3)
    width = text.count("moe_intermediate_size")
    moe = moe_of(text, "n_routed_experts", width, scoring="sigmoid")
    return experts_in(shape, replace(moe, shared_ffn=text.count("share_expert_dim")), layers)


def sparse_layers(text: Fields, layers: int, first: int) -> list[int]:
    types = text.words("mlp_layer_types", layers)
    if types is None:
        return list(range(first, layers))
    for word in types:
        if word not in ("dense", "sparse"):
            raise text.error("mlp_layer_types", f"expected 'dense' or 'sparse', found '{word:.40}'")
    return [index for index, word in enumerate(types) if word == "sparse"]
