"""Language models whose layers attend in different ways: linear attention, unlike heads in sliding and full layers."""

from dataclasses import replace
from typing import Literal

from mmplan.scenario.attention_forms import GatedDelta
from mmplan.scenario.formats.hf.blocks_by_layer import each, full_layers, kinds_of_layers, sliding
from mmplan.scenario.formats.hf.experts import moe_of
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import Transformer


def delta_of(text: Fields) -> GatedDelta:
    """The gated delta rule as Qwen's keys name it."""
    delta = GatedDelta(
        key_heads=text.count("linear_num_key_heads"),
        value_heads=text.count("linear_num_value_heads"),
        key_dim=text.count("linear_key_head_dim"),
        value_dim=text.count("linear_value_head_dim"),
        conv=text.count("linear_conv_kernel_dim", most=1_000),
    )
    if delta.value_heads % delta.key_heads:
        message = f"{delta.value_heads} value heads are not a multiple of linear_num_key_heads = {delta.key_heads}"
        raise text.error("linear_num_value_heads", message)
    return delta


def gated_delta(text: Fields, shape: Transformer) -> Transformer:
    """Qwen3-Next and Qwen3.5: full layers with an output gate among layers with linear attention."""
    interval = text.optional("full_attention_interval", most=2_000) or 4
    full = full_layers(text, shape.layers, interval, other=("linear_attention",))
    delta = delta_of(text)

    def block(index: int, plain: Transformer) -> Transformer:
        if index in full:
            return replace(plain, qk_norm=True, out_gate="column")
        return replace(plain, qkv_bias=False, out_bias=False, delta=delta)

    return each(shape, block)


def short_convolutions(text: Fields, shape: Transformer) -> Transformer:
    """LFM2: convolutions between gates but for the layers that attend; the MLP's width follows from its key."""
    ffn = shape.ffn
    if text.flag("block_auto_adjust_ff_dim"):
        ffn = int(2 * ffn / 3)
        if text.get("block_ffn_dim_multiplier") is not None:
            unit = text.count("block_multiple_of")
            ffn = -(-int(text.ratio("block_ffn_dim_multiplier") * ffn) // unit) * unit
    listed = text.get("full_attn_idxs")
    if text.words("layer_types", shape.layers) is not None or listed is None:
        full = full_layers(text, shape.layers, None, other=("conv",))
    else:
        full = text.indices("full_attn_idxs", shape.layers)
    bias, kernel = text.flag("conv_bias"), text.count("conv_L_cache", most=1_000)

    def block(index: int, plain: Transformer) -> Transformer:
        plain = replace(plain, ffn=ffn)
        if index in full:
            return replace(plain, qk_norm=True)
        return replace(plain, short_conv=kernel, qkv_bias=bias, out_bias=bias, stored=plain.hidden if bias else 0)

    return each(shape, block)


def lfm3(text: Fields, shape: Transformer) -> Transformer:
    """LFM3: convolutions between gates, windows and full layers, a gate for each head, norms on both sides."""
    usual = ("conv", "conv", "full_attention", "conv", "sliding_attention", "conv")
    known = ("conv", "sliding_attention", "full_attention")
    types = kinds_of_layers(text, shape.layers, known, lambda i: usual[i] if i < 2 else usual[2 + (i - 2) % 4])
    bias, kernel = text.flag("conv_bias"), text.count("conv_L_cache", most=1_000)
    gate: Literal["head"] | None = "head" if text.flag("use_attention_gate") else None
    shape = replace(shape, post_norms=text.flag("use_sandwich_norm"))

    def block(index: int, plain: Transformer) -> Transformer:
        if types[index] == "conv":
            stored = plain.hidden if bias else 0
            return replace(plain, short_conv=kernel, qkv_bias=bias, out_bias=bias, stored=stored)
        plain = replace(plain, qk_norm=True, out_gate=gate)
        if types[index] == "full_attention":
            return plain
        return replace(plain, window_tokens=text.count("sliding_window", most=100_000_000), sliding=True)

    return each(shape, block)


def gemma2(text: Fields, shape: Transformer) -> Transformer:
    """Norms on both sides; every other layer has a window."""
    return sliding(text, replace(shape, post_norms=True), 2)


def gemma3(text: Fields, shape: Transformer) -> Transformer:
    """Norms on both sides and on queries and keys; five sliding layers for each full one. Image tokens see each other
    both ways in the model, here they are causal."""
    interval = text.optional("sliding_window_pattern", "_sliding_window_pattern", most=2_000) or 6
    return sliding(text, replace(shape, qk_norm=True, post_norms=True), interval)


def gemma4(text: Fields, shape: Transformer) -> Transformer:
    """Full layers have heads of their own width and number, and may take keys as values. With experts a dense MLP
    stands beside them, with three more norms, a scale of the router's input and one of each expert."""
    types = text.words("layer_types", shape.layers)
    full = (*full_layers(text, shape.layers, 6),) if types is None else full_layers(text, shape.layers, 6)
    full = tuple(sorted({*full, shape.layers - 1}))  # the class makes the last layer a full one
    shape = replace(shape, qk_norm=True, post_norms=True)
    if text.flag("enable_moe_block"):
        width = text.count("moe_intermediate_size")
        moe = moe_of(text, "num_experts", width, topk="top_k_experts", scoring="softmax")
        scales = 4 * shape.hidden + moe.experts
        shape = replace(shape, moe=replace(moe, shared_ffn=shape.ffn), stored=scales)
    same = text.flag("attention_k_eq_v")
    kv_heads = (text.optional("num_global_key_value_heads") or shape.kv_heads) if same else shape.kv_heads
    wide = text.optional("global_head_dim") or 512
    if text.get("per_layer_config") is not None:  # says all there is to say of single layers
        wide, kv_heads = shape.head_dim, shape.kv_heads
    window = text.count("sliding_window", most=100_000_000)
    if shape.heads % kv_heads:
        raise text.error("num_global_key_value_heads", f"{shape.heads} heads are not a multiple of {kv_heads}")

    def block(index: int, plain: Transformer) -> Transformer:
        if index in full:
            return replace(plain, head_dim=wide, kv_heads=kv_heads, keys_as_values=same)
        return replace(plain, window_tokens=window, sliding=True)

    return each(shape, block)


def step_as_now(text: Fields) -> Fields:
    """Keys of Step 3.7's own files as the class of transformers renames them: lists that go on behind the last layer,
    `moe_layers_enum`, `attention_other_setting`."""
    values, layers = dict(text.values), text.layers()
    more = text.optional("num_nextn_predict_layers", least=0, most=1_000) or 0
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(values.get(key), list) and more and len(values[key]) == layers + more:
            values[key] = values[key][:layers]
    enum = values.get("moe_layers_enum")
    if values.get("mlp_layer_types") is None and enum is not None:
        words = enum.split(",") if isinstance(enum, str) else enum
        if not isinstance(words, list) or not all(str(word).strip().isdigit() for word in words if str(word).strip()):
            raise text.error("moe_layers_enum", "expected indices of layers, separated by commas")
        chosen = {int(str(word)[:9]) for word in words if str(word).strip()}
        values["mlp_layer_types"] = ["sparse" if index in chosen else "dense" for index in range(layers)]
        text.log.read.add(text.key("moe_layers_enum"))
    other = values.get("attention_other_setting")
    if values.get("num_sliding_attention_heads") is None and isinstance(other, dict):
        values["num_sliding_attention_heads"] = other.get("num_attention_heads")
        text.log.read.add(text.key("attention_other_setting"))
    return replace(text, values=values)


def step(text: Fields, shape: Transformer) -> Transformer:
    """Step 3.7: a gate for each head, other head counts in sliding layers."""
    full = full_layers(text, shape.layers, None)
    near = text.optional("num_sliding_attention_heads") or shape.heads
    near = shape.heads if text.get("per_layer_config") is not None else near
    if near % shape.kv_heads:
        raise text.error("num_sliding_attention_heads", f"{near} heads are not a multiple of {shape.kv_heads}")

    def block(index: int, plain: Transformer) -> Transformer:
        plain = replace(plain, qk_norm=True, out_gate="head")
        if index in full:
            return plain
        window = text.count("sliding_window", most=100_000_000)
        return replace(plain, heads=near, window_tokens=window, sliding=True)

    return each(shape, block)


def llama4(text: Fields, shape: Transformer) -> Transformer:
    """Attention in blocks but for each fourth layer. The norms on queries and keys have no weights and are left out."""
    chunk = text.optional("attention_chunk_size", most=100_000_000)
    listed = text.get("no_rope_layers")
    if text.words("layer_types", shape.layers) is not None:
        full = full_layers(text, shape.layers, None, other=("chunked_attention",))
    elif isinstance(listed, list) and listed:
        if len(listed) != shape.layers:
            raise text.error("no_rope_layers", f"expected {shape.layers} numbers, found {len(listed)}")
        full = tuple(index for index, turns in enumerate(listed) if not turns)
    else:
        interval = text.count("no_rope_layer_interval", most=2_000)
        full = tuple(index for index in range(shape.layers) if (index + 1) % interval == 0)
    if chunk is None or len(full) == shape.layers:
        return shape
    return each(shape, lambda _, block: replace(block, window_tokens=chunk, global_layers=full))


def modernbert(text: Fields, shape: Transformer) -> Transformer:
    """ModernBERT (arXiv 2412.13663): both directions, windows but in every third block, a norm behind the embeddings in
    place of the first block's."""
    known = ("full_attention", "sliding_attention")
    often = text.optional("global_attn_every_n_layers", most=2_000) or 3
    types = kinds_of_layers(text, shape.layers, known, lambda index: known[index % often > 0])
    window, bias = text.count("local_attention", most=100_000_000), text.flag("norm_bias")
    shape = replace(shape, norm="layer", norm_bias=bias, causal=False, activation="gelu")
    return each(shape, lambda i, block: block if types[i] == known[0] else replace(block, window_tokens=window))


def ultrabert(text: Fields, shape: Transformer) -> Transformer:
    """LLaMA's blocks that see both sides, so many tokens on each, but for every third layer."""
    given = text.values.get("attention_windows")  # of each layer in older files, 0 or null where it sees all
    radius = text.count("sliding_window", most=100_000_000)
    if isinstance(given, list) and len(given) == shape.layers and text.get("layer_types") is None:
        full: tuple[int, ...] = tuple(index for index, window in enumerate(given) if not window)
        radius = next((window for window in given if window), radius)
    else:
        full = full_layers(text, shape.layers, 3)
    return replace(shape, causal=False, window_tokens=2 * radius + 1, global_layers=full)
