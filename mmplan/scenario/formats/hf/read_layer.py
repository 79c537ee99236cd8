"""Towers whose projector reads an inner layer: what is behind it is kept with the last block that is read, and never
computed (plans leave out what no loss depends on)."""

from dataclasses import replace

from mmplan.scenario.document import shown
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import ModelModule, Transformer, Variant


def up_to_read_layer(config: Fields, vision: ModelModule, key: str = "vision_feature_layer") -> ModelModule:
    """The tower up to the layer that `key` names as its hidden states are counted: 0 what enters the first block, -1
    what leaves the last one. Towers with other than plain blocks stay as they are."""
    value, shape = config.get(key), vision.transformer
    layer = value[0] if isinstance(value, list) and len(value) == 1 else value
    if shape is None or vision.form is not None or layer is None:
        return vision
    if not isinstance(layer, int) or not -shape.layers <= layer <= shape.layers or layer == 0:
        raise config.error(key, f"expected a layer of a tower of {shape.layers} blocks, found {shown(value)}")
    count = layer if layer > 0 else shape.layers + 1 + layer
    if count >= shape.layers or not _plain(shape):
        return vision
    told = f"nothing reads {shape.layers - count} of the tower's {shape.layers} blocks: kept, never computed"
    config.log.notes.append(told)
    norm = _norm_numbers(shape) if shape.final_norm else 0
    unread = (shape.layers - count) * _block_numbers(shape) + norm
    last = replace(shape, stored=unread)
    shorter = replace(shape, layers=count, final_norm=False, variants=(Variant(layers=(count - 1,), shape=last),))
    return replace(vision, transformer=shorter)


def _plain(shape: Transformer) -> bool:
    odd = (shape.moe, shape.mla, shape.delta, shape.out_gate, shape.short_conv, shape.stored, shape.variants)
    more = (shape.qk_norm, shape.post_norms, shape.layer_scale, shape.parallel, shape.keys_as_values)
    return not any(odd) and not any(more) and shape.pre_norms and not shape.cross_layers


def _block_numbers(shape: Transformer) -> int:
    """Parameters of a plain block."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = shape.ffn * (2 if shape.gated_mlp else 1)
    products = shape.hidden * (2 * queries + 2 * keys + inner + shape.ffn)
    biases = (queries + keys + keys * shape.key_bias) * shape.qkv_bias
    biases += shape.hidden * shape.out_bias + (inner + shape.hidden) * shape.mlp_bias
    return products + biases + 2 * _norm_numbers(shape)


def _norm_numbers(shape: Transformer) -> int:
    return shape.hidden * (2 if shape.norm == "layer" and shape.norm_bias else 1)
