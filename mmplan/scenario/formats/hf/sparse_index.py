"""Mistral Large 4's blocks: latent attention whose keys an index of its own chooses for each token, without positions
in every fourth layer."""

from dataclasses import replace

from mmplan.scenario.formats.hf.blocks_by_layer import each
from mmplan.scenario.formats.hf.experts import deepseek_experts, latent_attention
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import Transformer
from mmplan.scenario.steps import Choose, Form, Kept, Usual


def stack(text: Fields, shape: Transformer) -> Transformer:
    """Attention is priced over as many keys as are chosen, as if they were the last ones."""
    sources = text.get("kv_source_layers")
    if sources not in (None, list(range(shape.layers))):
        raise text.error("kv_source_layers", "layers that read another one's keys and values are not read")
    for key in ("indexer_types", "index_topk_pattern", "index_topk_freq"):
        value = text.get(key)
        if value not in (None, 1) and not (
            isinstance(value, list | str) and all(one in ("full", "F") for one in value)
        ):
            raise text.error(key, "layers that read another one's choice of keys are not read")
    types = text.words("mlp_layer_types", shape.layers)
    first = text.count("first_k_dense_replace", least=0, most=1_000_000)
    if types not in (None, ["dense"] * first + ["sparse"] * (shape.layers - first)):
        raise text.error("mlp_layer_types", f"expected {first} dense layers and then sparse ones")
    turned, often = text.get("no_rope_layers"), text.optional("no_rope_layer_interval", most=2_000) or 4
    if turned is None:
        turned = [(index + 1) % often != 0 for index in range(shape.layers)]
    if not isinstance(turned, list) or len(turned) < shape.layers or any(one not in (0, 1) for one in turned):
        raise text.error("no_rope_layers", f"expected {shape.layers} zeros and ones")
    chosen = text.count("index_topk", most=100_000_000)
    shape = replace(latent_attention(text, shape), window_tokens=chosen, sliding=True, stored=2 * shape.heads)
    shape = deepseek_experts(text, shape)
    assert shape.mla is not None
    plain = replace(shape.mla, qk_nope=shape.mla.qk_nope + shape.mla.qk_rope, qk_rope=0)
    return each(shape, lambda index, block: block if turned[index] else replace(block, mla=plain))


def form(text: Fields, shape: Transformer) -> Form:
    heads, width = text.count("index_n_heads"), text.count("index_head_dim")
    kept = heads * shape.hidden + 2 * width + 2 * shape.hidden + 2 * heads  # weights of heads, norms, scales
    index = Choose(heads=heads, head_dim=width)
    return Form(blocks=((shape.layers, (index, Kept(size=kept), Usual())),))
