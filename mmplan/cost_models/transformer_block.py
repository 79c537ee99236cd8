"""One block of a transformer: norm, attention, residual, norm, MLP or experts, residual (pre-norm).

Some models put norms behind the branches instead, or let attention and MLP read one norm and add both at once.
"""

from functools import partial

from mmplan.cost_models.blocks import attention_ops, mlp_body, residual_ops
from mmplan.cost_models.experts import moe_ops
from mmplan.cost_models.latent_attention import mla_ops
from mmplan.cost_models.linear_attention import delta_ops, short_conv_ops
from mmplan.cost_models.ops import Add, AddRows, Norm, Op, Stored
from mmplan.cost_models.step_ops import Around, step_ops
from mmplan.cost_models.values import CONTEXT, TOKENS, Value
from mmplan.scenario.scenario import Training, Transformer
from mmplan.scenario.steps import Form, Usual, uses


def block_ops(
    shape: Transformer,
    training: Training,
    index: int,
    *,
    rope: bool,
    context_width: int | None = None,
    added: tuple[tuple[str, str], ...] = (),
    form: Form | None = None,
) -> tuple[Op, ...]:
    """Block `index` of shape `shape.at(index)`: input `x` [tokens, hidden], and `context` for cross layers.

    Args:
        rope: rotary positions on queries and keys.
        added: (value, key) of each rows that are added to the block's output where the tokens of module `key` lie.
        form: of the module, whose steps may stand in place of the block.
    """
    shape = shape.at(index)
    is_global = shape.window_tokens is None or index in shape.global_layers
    context = Value("context", CONTEXT, context_width) if context_width is not None else None
    x, middle, y = (Value(name, TOKENS, shape.hidden) for name in ("x", "middle", "y"))
    if form is not None and form.streams:
        x = Value("x", TOKENS, shape.hidden * form.streams[index])
    window = None if is_global or (context is not None and not shape.cross_also) else shape.window_tokens
    steps = form.block(index) if form is not None else ()
    if steps:
        usual = partial(block_ops, shape, training, index, rope=rope)
        other = shape.delta is not None or shape.mla is not None or shape.short_conv
        mixer = partial(_attention, shape, training, rope=rope, window=window, context=None) if other else None
        around = Around(shape=shape, context=context, window=window, rope=rope, usual=usual, mixer=mixer)
        ops = list(step_ops(steps, x, TOKENS, training, around))
    elif shape.parallel:
        ops = _parallel_parts(shape, training, index, x, y, rope=rope, window=window)
    else:
        attended, ops = _attention_part(shape, training, x, middle, rope=rope, window=window, context=context)
        ops += _mlp_part(shape, training, index, attended, y)
    if shape.stored and not uses(steps, Usual):
        trained, last = training.mode == "full", ops[-1].y
        kept = Value("y_kept", TOKENS, last.width)
        ops.append(Stored(name="stored", x=last, y=kept, size=shape.stored, trainable=trained))
    for number, (value, key) in enumerate(added):
        rows, result = Value(value, TOKENS, shape.hidden), Value(f"y_added{number or ''}", TOKENS, shape.hidden)
        ops.append(AddRows(a=ops[-1].y, b=rows, y=result, key=key))
    return tuple(ops)


def _attention_part(
    shape: Transformer, training: Training, x: Value, y: Value, *, rope: bool, window: int | None, context: Value | None
) -> tuple[Value, list[Op]]:
    """Self-attention, cross-attention, or with `cross_also` one after the other, and the value behind them."""
    if context is not None and shape.cross_also:
        own, ops = _attention_part(shape, training, x, y, rope=rope, window=window, context=None)
        normed, norms = _normed(shape, training, "cross", own)
        between = attention_ops(shape, training, normed, rope=False, window=None, context=context, prefix="cross_")
        result = Value("crossed", TOKENS, shape.hidden)
        return result, [*ops, *norms, *between, *residual_ops(shape, training, "cross", own, between[-1].y, result)]
    normed, norms = _normed(shape, training, "attn", x)
    branch = _attention(shape, training, normed, rope=rope, window=window, context=context)
    return y, [*norms, *branch, *residual_ops(shape, training, "attn", x, branch[-1].y, y)]


def _attention(
    shape: Transformer, training: Training, normed: Value, *, rope: bool, window: int | None, context: Value | None
) -> tuple[Op, ...]:
    if shape.delta is not None:
        return delta_ops(shape, shape.delta, training, normed)
    if shape.short_conv:
        return short_conv_ops(shape, training, normed)
    if shape.mla is not None and context is None:
        return mla_ops(shape, shape.mla, training, normed, window)
    return attention_ops(shape, training, normed, rope=rope, window=window, context=context)


def _mlp(shape: Transformer, training: Training, index: int, normed: Value) -> tuple[Op, ...]:
    if shape.moe is not None and shape.moe.in_layer(index):
        return moe_ops(shape, shape.moe, training, normed)
    return mlp_body(shape, training, normed, Value("mlp_out", TOKENS, shape.hidden), shape.ffn)


def _mlp_part(shape: Transformer, training: Training, index: int, x: Value, y: Value) -> list[Op]:
    normed, norms = _normed(shape, training, "mlp", x)
    branch = _mlp(shape, training, index, normed)
    return [*norms, *branch, *residual_ops(shape, training, "mlp", x, branch[-1].y, y)]


def _parallel_parts(
    shape: Transformer, training: Training, index: int, x: Value, y: Value, *, rope: bool, window: int | None
) -> list[Op]:
    normed, norms = _normed(shape, training, "attn", x)
    attended = _attention(shape, training, normed, rope=rope, window=window, context=None)
    computed = _mlp(shape, training, index, normed)
    both = Value("branches", TOKENS, shape.hidden)
    return [*norms, *attended, *computed, Add(a=attended[-1].y, b=computed[-1].y, y=both), Add(a=x, b=both, y=y)]


def _normed(shape: Transformer, training: Training, part: str, x: Value) -> tuple[Value, list[Op]]:
    """What a branch reads: x behind its norm, or as it is."""
    if not shape.pre_norms:
        return x, []
    normed, trained = Value(f"{part}_normed", TOKENS, shape.hidden), training.mode == "full"
    norm = Norm(name=f"{part}_norm", x=x, y=normed, kind=shape.norm, trainable=trained, bias=shape.norm_bias)
    return normed, [norm]
