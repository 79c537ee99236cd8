"""One block of a transformer: norm, attention, residual, norm, MLP or experts, residual (pre-norm)."""

from mmplan.cost_models.blocks import attention_ops, mlp_body, residual_ops
from mmplan.cost_models.experts import moe_ops
from mmplan.cost_models.latent_attention import mla_ops
from mmplan.cost_models.ops import AddRows, Norm, Op
from mmplan.cost_models.values import CONTEXT, TOKENS, Value
from mmplan.scenario.scenario import Training, Transformer


def block_ops(
    shape: Transformer,
    training: Training,
    index: int,
    *,
    rope: bool,
    context_width: int | None = None,
    added: tuple[str, str] | None = None,
) -> tuple[Op, ...]:
    """Block `index`: input `x` [tokens, hidden], and `context` for cross layers.

    Args:
        rope: rotary positions on queries and keys.
        added: (value, key) of rows that are added to the block's output where the tokens of module `key` lie.
    """
    is_global = shape.window_tokens is None or index in shape.global_layers
    context = Value("context", CONTEXT, context_width) if context_width is not None else None
    x, middle, y = (Value(name, TOKENS, shape.hidden) for name in ("x", "middle", "y"))
    window = None if is_global or context is not None else shape.window_tokens
    ops = [
        *_attention_part(shape, training, x, middle, rope=rope, window=window, context=context),
        *_mlp_part(shape, training, index, middle, y),
    ]
    if added is not None:
        value, key = added
        ops.append(
            AddRows(a=y, b=Value(value, TOKENS, shape.hidden), y=Value("y_added", TOKENS, shape.hidden), key=key)
        )
    return tuple(ops)


def _attention_part(
    shape: Transformer, training: Training, x: Value, y: Value, *, rope: bool, window: int | None, context: Value | None
) -> tuple[Op, ...]:
    normed = Value("attn_normed", TOKENS, shape.hidden)
    norm = Norm(name="attn_norm", x=x, y=normed, kind=shape.norm, trainable=training.mode == "full")
    if shape.mla is not None and context is None:
        ops = mla_ops(shape, shape.mla, training, normed, window)
    else:
        ops = attention_ops(shape, training, normed, rope=rope, window=window, context=context)
    return (norm, *ops, *residual_ops(shape, training, "attn", x, ops[-1].y, y))


def _mlp_part(shape: Transformer, training: Training, index: int, x: Value, y: Value) -> tuple[Op, ...]:
    normed, out = Value("mlp_normed", TOKENS, shape.hidden), Value("mlp_out", TOKENS, shape.hidden)
    norm = Norm(name="mlp_norm", x=x, y=normed, kind=shape.norm, trainable=training.mode == "full")
    if shape.moe is not None and shape.moe.in_layer(index):
        ops = moe_ops(shape, shape.moe, training, normed)
    else:
        ops = mlp_body(shape, training, normed, out, shape.ffn)
    return (norm, *ops, *residual_ops(shape, training, "mlp", x, ops[-1].y, y))
