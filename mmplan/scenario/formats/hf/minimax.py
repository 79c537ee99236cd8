"""MiniMax-M3: experts in most blocks, attention that reads blocks of keys which an index of its own chooses."""

from dataclasses import replace

from mmplan.scenario.formats.hf.blocks_by_layer import each, kinds_of_layers
from mmplan.scenario.formats.hf.experts import moe_of, sparse_layers
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import chain, stepping
from mmplan.scenario.scenario import Model, ModelModule, Transformer
from mmplan.scenario.steps import Active, Choose, Dense, Form, Join, Kept, Steps, Usual


def sparse(text: Fields, layers: int) -> list[bool]:
    """Which blocks choose their keys: `layer_types`, or the released files' `sparse_attention_config`."""
    older = text.values.get("sparse_attention_config")
    often = older.get("sparse_attention_freq") if isinstance(older, dict) else None
    if text.get("layer_types") is None and often is not None:
        text.log.read.add(text.key("sparse_attention_config"))
        if not isinstance(often, list) or len(often) != layers or not all(one in (0, 1) for one in often):
            raise text.error("sparse_attention_config.sparse_attention_freq", f"expected {layers} zeros and ones")
        return [bool(one) for one in often]
    known = ("full_attention", "minimax_m3_sparse")
    return [word != known[0] for word in kinds_of_layers(text, layers, known, lambda _: known[0])]


def stack(text: Fields, shape: Transformer) -> Transformer:
    """`intermediate_size` is that of an expert. A block of keys is as wide as `index_block_size`."""
    moe = moe_of(text, "num_local_experts", shape.ffn, scoring="sigmoid")
    moe = replace(moe, shared_ffn=text.count("shared_intermediate_size"))
    often = text.values.get("moe_layer_freq")
    layers = sparse_layers(text, shape.layers, first=0)
    if text.get("mlp_layer_types") is None and often is not None:
        text.log.read.add(text.key("moe_layer_freq"))
        if not isinstance(often, list) or len(often) != shape.layers or not all(one in (0, 1) for one in often):
            raise text.error("moe_layer_freq", f"expected {shape.layers} zeros and ones")
        layers = [index for index, one in enumerate(often) if one]
    chooses, dense = sparse(text, shape.layers), text.count("dense_intermediate_size")
    window = _index(text, "index_topk_blocks") * _index(text, "index_block_size")

    def block(index: int, plain: Transformer) -> Transformer:
        plain = replace(plain, moe=moe) if index in layers else replace(plain, ffn=dense)
        return replace(plain, window_tokens=window, sliding=True) if chooses[index] else plain

    return each(replace(shape, qk_norm=True), block)


OLDER = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
}


def _index(text: Fields, key: str) -> int:
    older = text.values.get("sparse_attention_config")
    if isinstance(older, dict) and OLDER[key] in older:  # it wins in the class too
        return replace(text, values=older, path=text.key("sparse_attention_config")).count(OLDER[key])
    return text.count(key)


def form(text: Fields, shape: Transformer) -> Form | None:
    chooses = sparse(text, shape.layers)
    if not any(chooses):
        return None
    heads, width = _index(text, "index_n_heads"), _index(text, "index_head_dim")
    chosen: Steps = (Choose(heads=heads, head_dim=width), Kept(size=2 * width), Usual())
    return Form(blocks=tuple((1, chosen if one else (Usual(),)) for one in chooses))


def family(config: Fields, name: str, vision: ModelModule, llm: ModelModule) -> Model:
    """Two linears for each token, then two for each 2 x 2 of them."""
    inner, width = config.count("projector_hidden_size"), llm.output_width
    merge = config.part("vision_config").count("spatial_merge_size", most=100) ** 2
    joined = config.optional("merged_hidden_size") or merge * width
    if joined != merge * width:
        message = f"{merge} joined tokens of width {width} are {merge * width}, found {joined}"
        raise config.error("merged_hidden_size", message)
    first: Steps = (Dense(width=inner), Active(), Dense(width=width))
    steps: Steps = (*first, Join(rows=merge), Dense(width=inner), Active(), Dense(width=width))
    return chain(name, vision, stepping(steps, (vision.output_width, width), name="projector", merge=merge), llm)
