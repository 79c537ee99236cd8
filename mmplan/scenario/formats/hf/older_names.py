"""Language models whose classes use names of their own for sizes, and Kimi Linear: MPT, DBRX."""

from dataclasses import replace

from mmplan.scenario.attention_forms import GatedDelta
from mmplan.scenario.document import shown
from mmplan.scenario.formats.hf.blocks_by_layer import each, experts_in, kinds_of_layers
from mmplan.scenario.formats.hf.experts import latent_attention, moe_of, sparse_layers
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import Transformer
from mmplan.scenario.steps import Form, Usual


def mpt(text: Fields) -> Fields:
    """MPT (Databricks): slopes in place of positions. The class of transformers has no biases, no norms of queries and
    keys, and an MLP four times as wide whatever `expansion_ratio` says."""
    width = text.count("d_model")
    sizes = {"hidden_size": width, "intermediate_size": 4 * width}
    return replace(text, values={**text.values, **sizes, "num_attention_heads": text.count("n_heads")})


def dbrx(text: Fields) -> Fields:
    """DBRX: sizes of attention and of experts stand in configs of their own."""
    attention, inner = text.part("attn_config", kind="dbrx_attention"), text.part("ffn_config", kind="dbrx_ffn")
    sizes = {
        "hidden_size": text.count("d_model"),
        "num_attention_heads": text.count("n_heads"),
        "num_hidden_layers": text.count("n_layers", most=2_000),
        "num_key_value_heads": attention.count("kv_n_heads"),
        "intermediate_size": inner.count("ffn_hidden_size"),
        "num_local_experts": inner.count("moe_num_experts", most=100_000),
        "num_experts_per_tok": inner.count("moe_top_k", most=100_000),
    }
    return replace(text, values={**text.values, **sizes})


def kimi_linear(text: Fields, shape: Transformer) -> Transformer:
    """Kimi Linear (arXiv 2510.26692): Kimi delta attention but for every fourth layer, experts in all but the first."""
    words, older = ("full_attention", "linear_attention"), text.values.get("linear_attn_config")
    given = older if isinstance(older, dict) else {}
    full = given.get("full_attn_layers") if "kda_layers" in given else None
    if full is not None and not isinstance(full, list):
        raise text.error("linear_attn_config", f"expected a list of full_attn_layers, found {shown(full)}")
    kinds = kinds_of_layers(
        text,
        shape.layers,
        words,
        lambda i: words[(i + 1 not in full) if full is not None else not (i and i % 4 == 0)],
    )
    inner = replace(text, values={**text.values, **given}, path=text.path)
    width = inner.count("head_dim" if "head_dim" in given else "linear_head_dim", most=100_000)
    heads = inner.count("num_heads" if "num_heads" in given else "linear_num_heads", most=100_000)
    kernel = inner.count(
        "short_conv_kernel_size" if "short_conv_kernel_size" in given else "linear_conv_kernel_dim", most=1_000
    )
    delta = GatedDelta(key_heads=heads, value_heads=heads, key_dim=width, value_dim=width, conv=kernel, gate_rank=width)
    own, shared = text.count("moe_intermediate_size"), text.count("n_shared_experts", least=0, most=1_000)
    moe = replace(moe_of(text, "num_local_experts", own, scoring="sigmoid"), shared_ffn=own * shared)
    first = text.optional("first_k_dense_replace", least=0, most=1_000_000)
    stack = experts_in(shape, moe, sparse_layers(text, shape.layers, first=1 if first is None else first))
    latent, linear = latent_attention(text, shape), replace(shape, delta=delta, qkv_bias=False, out_bias=False)

    def block(index: int, plain: Transformer) -> Transformer:
        base = latent if kinds[index] == words[0] else linear
        return replace(base, moe=plain.moe if plain.moe and plain.moe.in_layer(index) else None)

    return each(stack, block)


def priced(text: Fields, shape: Transformer) -> Form:
    """Usual blocks that the runtime does not build."""
    del text
    return Form(blocks=((shape.layers, (Usual(),)),))
