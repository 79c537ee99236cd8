"""Blocks of Inkling's language models: windows but for every sixth layer, short convolutions behind keys, values and
both branches, biases of scores that a token's own projection mixes from learned profiles of distance."""

from dataclasses import replace

from mmplan.scenario.formats.hf.blocks_by_layer import each, experts_in, kinds_of_layers
from mmplan.scenario.formats.hf.experts import moe_of, sparse_layers
from mmplan.scenario.formats.hf.streams import RMS, chosen
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import Transformer
from mmplan.scenario.steps import (
    Aside,
    Attend,
    Beside,
    Convolve,
    Dense,
    Experts,
    Fork,
    Form,
    Kept,
    Mlp,
    Split,
    Step,
    Steps,
    residual,
)

FULL, NEAR = "hybrid", "hybrid_sliding"


def as_now(text: Fields) -> Fields:
    """Released files give the dense layers' width apart and then that of experts as `intermediate_size`."""
    values = dict(text.values)
    if values.get("dense_intermediate_size") is not None:
        values["moe_intermediate_size"] = values.get("intermediate_size", text.defaults.get("intermediate_size"))
        values["intermediate_size"] = values["dense_intermediate_size"]
    return replace(text, values=values)


def _kinds(text: Fields, layers: int) -> list[str]:
    near = text.indices("local_layer_ids", layers) if text.get("local_layer_ids") is not None else None
    return kinds_of_layers(
        text, layers, (FULL, NEAR), lambda i: NEAR if ((i + 1) % 6 if near is None else i in near) else FULL
    )


def _near(text: Fields, shape: Transformer) -> Transformer:
    """Windows, with heads of their own."""
    heads, kv_heads = text.count("swa_num_attention_heads"), text.count("swa_num_key_value_heads")
    if heads % kv_heads:
        raise text.error("swa_num_key_value_heads", f"{heads} heads are not a multiple of {kv_heads}")
    kinds, window = _kinds(text, shape.layers), text.count("sliding_window_size", most=100_000_000)
    width = text.count("swa_head_dim")

    def block(index: int, plain: Transformer) -> Transformer:
        if kinds[index] == FULL:
            return plain
        return replace(plain, heads=heads, kv_heads=kv_heads, head_dim=width, window_tokens=window, sliding=True)

    return each(shape, block)


def first(text: Fields, shape: Transformer) -> Transformer:
    """Inkling: routed experts beside shared ones that the router scores too."""
    width, shared = text.count("moe_intermediate_size"), text.count("n_shared_experts", least=0, most=1_000)
    moe = replace(moe_of(text, "n_routed_experts", width, scoring="sigmoid"), shared_ffn=width * shared)
    dense = text.optional("dense_mlp_idx", least=0, most=1_000_000) or 0
    sparse = experts_in(replace(shape, qk_norm=True), moe, sparse_layers(text, shape.layers, first=dense))
    return _near(text, each(sparse, lambda i, b: b if b.moe and b.moe.in_layer(i) else replace(b, moe=None)))


def second(text: Fields, shape: Transformer) -> Transformer:
    """Inkling 2: experts everywhere, a gate on what attention gives; queries and keys are clipped, not normed."""
    moe = moe_of(text, "n_routed_experts", text.count("moe_intermediate_size"), scoring="sigmoid")
    return _near(text, replace(shape, moe=moe, out_gate="column"))


def _attention(text: Fields, block: Transformer, kernel: int) -> Steps:
    """Attention with its biases; the convolutions on keys and values are kept, not counted."""
    width = text.count("d_rel", most=10_000)
    extent = text.count("rel_extent", most=10_000_000) if block.window_tokens is None else block.window_tokens
    profile: Steps = (
        Dense(width=block.heads * width, bias=False),
        Split(parts=block.heads),
        Dense(width=extent, bias=False),
    )
    return (Aside(steps=profile), Attend(), Kept(size=2 * kernel * block.kv_heads * block.head_dim))


def form_of_first(text: Fields, shape: Transformer) -> Form:
    kernel, shared = text.count("conv_kernel_size", most=1_000), text.count("n_shared_experts", least=0, most=1_000)
    near = residual(Convolve(width=shape.hidden, taps=kernel, groups=shape.hidden, bias=False))
    blocks: list[tuple[int, Steps]] = []
    for index in range(shape.layers):
        block = shape.at(index)
        sparse = block.moe is not None and block.moe.in_layer(index)
        body: Step = Experts() if sparse else Mlp()
        kept = Kept(size=shared * shape.hidden + 1 if sparse else 1)  # the router's scores of shared experts, a scale
        attention = residual(RMS, *_attention(text, block, kernel), near)
        blocks.append((1, (attention, residual(RMS, body, kept, near))))
    return Form(blocks=tuple(blocks))


def form_of_second(text: Fields, shape: Transformer) -> Form:
    """Each branch reads a weighted mean of the rows now and of those before every sixth layer, which all later layers
    read; a full layer has such means for queries, keys and values."""
    often, layers = text.count("n_layers_per_attn_res_block", most=100_000), shape.layers
    parts = tuple(1 + -(-index // often) for index in range(layers))
    blocks = [_second_block(text, shape, index, parts[index], index % often == 0) for index in range(layers)]
    after = parts[-1] + ((layers - 1) % often == 0)
    blocks[-1] += chosen(after)
    return Form(blocks=tuple((1, steps) for steps in blocks), streams=parts)


def _second_block(text: Fields, shape: Transformer, index: int, parts: int, boundary: bool) -> Steps:
    block, kernel = shape.at(index), text.count("conv_kernel_size", most=1_000)
    hidden, full = shape.hidden, block.window_tokens is None
    near = residual(Convolve(width=hidden, taps=kernel, groups=hidden, bias=False))
    scales = block.heads * (block.head_dim + text.count("d_rel", most=10_000))
    aside: Steps = (Aside(steps=(Dense(width=block.heads, bias=False),)),)  # sinks
    if full:  # taps of the convolutions on keys and values, of each token
        aside += (Aside(steps=(Dense(width=2 * block.kv_heads * kernel, bias=False),)),)
    read: Steps = chosen(parts, 3 if full else 1) if index else (Kept(size=2 * hidden if full else 0),)
    attention: Steps = (*read, RMS, *aside, *_attention(text, block, kernel), near, Kept(size=scales))
    body: Steps = (*chosen(parts + boundary), RMS, Experts(), near)
    return (Beside(steps=attention) if boundary else Fork(left=(), right=attention), Fork(left=(), right=body))
