"""Sequence parallelism inside a layer: of which values each tensor-parallel rank has rows, and whose weights it applies
to these alone, so that ranks have parts of their gradients (Megatron, arXiv 2205.05198, section 4.2.2)."""

from mmplan.cost_models.counts import op_parameters
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.ops import Linear, Norm, Scale, op_inputs, op_trainable
from mmplan.cost_models.shard import Shard

_CHANGED = ("block", "cross_block", "head")


def values_in_rows(layer: Layer, shard: Shard) -> frozenset[str]:
    """Values of which each tp rank has its rows: with sequence parallelism those of tokens that tp does not split along
    width, but for what other modules give."""
    if not shard.sequence or shard.tp == 1 or layer.kind not in _CHANGED:
        return frozenset()
    given = {source.value for source in layer.sources if source.producer.rpartition(".")[0] != layer.module}
    values = [value for op in layer.ops for value in (*op_inputs(op), op.y)]
    split = {v.name for v in values if v.rows.field == "tokens" and not v.sharded and not v.routed}
    return frozenset(split - given)


def summed_weights(layer: Layer, shard: Shard) -> dict[str, int]:
    """Operator of a rank (`local_layer.py`) -> elements of its weights, which every tp rank has alike and applies to
    its rows: their gradients are summed."""
    own, summed = values_in_rows(layer, shard), dict[str, int]()
    for op in layer.ops:
        if not op_trainable(op) or op.y.name not in own:
            continue
        if isinstance(op, Linear) and op.parallel == "row" and op.bias:
            summed[f"{op.name}_sum"] = op.y.width
        elif isinstance(op, Linear | Norm | Scale) and op.x.name in own:
            summed[op.name] = op_parameters(op)
    return summed
