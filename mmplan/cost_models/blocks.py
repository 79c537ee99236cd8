"""The operators of each kind of layer, from the dimensions in a scenario.

Pre-norm transformer blocks as in ViT (arXiv 2010.11929), LLaMA (2302.13971), Whisper (2212.04356) and the gated
cross-attention layers of Llama 3.2; tensor parallelism as in Megatron (1909.08053): column then row.
"""

from dataclasses import replace
from typing import Literal

from mmplan.cost_models.ops import (
    CONTEXT,
    TOKENS,
    Activation,
    Add,
    Attention,
    Linear,
    MergeRows,
    Multiply,
    Norm,
    Op,
    Parallel,
    Rope,
    Rows,
    Value,
)
from mmplan.scenario.scenario import Projector, Training, Transformer


def linear_ops(
    name: str, x: Value, y: Value, training: Training, *, bias: bool, parallel: Parallel = "none"
) -> tuple[Op, ...]:
    """x W^T (+ b); with LoRA on `name`: the frozen linear plus x A^T B^T (arXiv 2106.09685, scale 1, no dropout).

    A splits like the inputs of W and B like its outputs, so the adapter adds no communication but of rank-wide rows.
    """
    base = Linear(name=name, x=x, y=y, bias=bias, trainable=training.mode == "full", parallel=parallel)
    if training.mode != "lora" or name not in training.targets:
        return (base,)
    low = Value(f"{name}.low", x.rows, training.rank)
    frozen, delta = replace(y, name=f"{name}.base"), replace(y, name=f"{name}.delta")
    a_parallel: Parallel = "row" if parallel == "row" else "none"
    b_parallel: Parallel = "column" if parallel == "column" else "none"
    return (
        replace(base, y=frozen),
        Linear(name=f"{name}_a", x=x, y=low, bias=False, trainable=True, parallel=a_parallel),
        Linear(name=f"{name}_b", x=low, y=delta, bias=False, trainable=True, parallel=b_parallel),
        Add(a=frozen, b=delta, y=y),
    )


def attention_ops(
    shape: Transformer, training: Training, x: Value, y: Value, *, rope: bool, window: int | None, context: Value | None
) -> tuple[Op, ...]:
    """Norm, projections, attention, output projection, residual: x [tokens, hidden] -> y."""
    trained = training.mode == "full"
    normed = Value("attn_normed", TOKENS, shape.hidden)
    source = context or normed
    query_width, key_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    q = Value("q", TOKENS, query_width, sharded=True)
    k, v = (Value(name, source.rows, key_width, sharded=True) for name in ("k", "v"))
    ops: list[Op] = [Norm(name="attn_norm", x=x, y=normed, kind=shape.norm, trainable=trained)]
    ops += linear_ops("q", normed, q, training, bias=shape.qkv_bias, parallel="column")
    ops += linear_ops("k", source, k, training, bias=shape.qkv_bias and shape.key_bias, parallel="column")
    ops += linear_ops("v", source, v, training, bias=shape.qkv_bias, parallel="column")
    if shape.qk_norm:
        q, k, plain_q, plain_k = replace(q, name="q_normed"), replace(k, name="k_normed"), q, k
        ops.append(Norm(name="q_norm", x=plain_q, y=q, kind=shape.norm, trainable=trained, groups=shape.heads))
        ops.append(Norm(name="k_norm", x=plain_k, y=k, kind=shape.norm, trainable=trained, groups=shape.kv_heads))
    if rope and context is None:
        q, k, plain_q, plain_k = replace(q, name="q_rotated"), replace(k, name="k_rotated"), q, k
        ops += [Rope(x=plain_q, y=q, heads=shape.heads), Rope(x=plain_k, y=k, heads=shape.kv_heads)]
    attended = Value("attended", TOKENS, query_width, sharded=True)
    pairs = Rows("context_pairs" if context else "window_pairs" if window else "pairs")
    attention = Attention(
        q=q,
        k=k,
        v=v,
        y=attended,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        causal=shape.causal and context is None,
        pairs=pairs,
        window=window,
        cross=context is not None,
    )
    projected = Value("attn_out", TOKENS, shape.hidden)
    ops.append(attention)
    ops += linear_ops("o", attended, projected, training, bias=shape.out_bias, parallel="row")
    return (*ops, Add(a=x, b=projected, y=y))


def mlp_ops(shape: Transformer, training: Training, x: Value, y: Value) -> tuple[Op, ...]:
    """Norm, up (and gate), activation, down, residual: SiLU-gated as in LLaMA, else GELU."""
    normed = Value("mlp_normed", TOKENS, shape.hidden)
    wide = [Value(name, TOKENS, shape.ffn, sharded=True) for name in ("up", "gate", "active", "product")]
    up, gate, active, product = wide
    ops: list[Op] = [Norm(name="mlp_norm", x=x, y=normed, kind=shape.norm, trainable=training.mode == "full")]
    ops += linear_ops("up", normed, up, training, bias=shape.mlp_bias, parallel="column")
    if shape.gated_mlp:
        ops += linear_ops("gate", normed, gate, training, bias=shape.mlp_bias, parallel="column")
        ops += [Activation(kind="silu", x=gate, y=active), Multiply(a=active, b=up, y=product)]
    else:
        ops.append(Activation(kind="gelu", x=up, y=active))
        product = active
    down = Value("mlp_out", TOKENS, shape.hidden)
    ops += linear_ops("down", product, down, training, bias=shape.mlp_bias, parallel="row")
    return (*ops, Add(a=x, b=down, y=y))


def block_ops(
    shape: Transformer, training: Training, index: int, *, rope: bool, context_width: int | None = None
) -> tuple[Op, ...]:
    """Block `index` of a transformer; input `x`, and `context` for cross layers."""
    is_global = shape.window_tokens is None or index in shape.global_layers
    context = Value("context", CONTEXT, context_width) if context_width is not None else None
    x, middle, y = (Value(name, TOKENS, shape.hidden) for name in ("x", "middle", "y"))
    window = None if is_global or context is not None else shape.window_tokens
    attention = attention_ops(shape, training, x, middle, rope=rope, window=window, context=context)
    return (*attention, *mlp_ops(shape, training, middle, y))


def projector_ops(shape: Projector, training: Training, width: int) -> tuple[Op, ...]:
    """Merge, norm, linears with GELU between them: x [context_tokens, width] -> [tokens, dims[-1]].

    Pairs of linears are column- then row-parallel; a last odd one is whole on every rank.
    """
    trained = training.mode == "full"
    value, ops = Value("x", CONTEXT, width), list[Op]()

    def norm(kind: Literal["layer", "rms"], x: Value) -> Value:
        y = Value("normed", x.rows, x.width)
        ops.append(Norm(name="norm", x=x, y=y, kind=kind, trainable=trained))
        return y

    if shape.norm is not None and shape.norm_before_merge:
        value = norm(shape.norm, value)
    merged = Value("merged", TOKENS, value.width * shape.merge)
    ops.append(MergeRows(x=value, y=merged, merge=shape.merge))
    value = merged
    if shape.norm is not None and not shape.norm_before_merge:
        value = norm(shape.norm, value)
    count = len(shape.dims) - 1
    for position, out in enumerate(shape.dims[1:]):
        is_column, is_row = position % 2 == 0 and position + 1 < count, position % 2 == 1
        parallel: Parallel = "column" if is_column else "row" if is_row else "none"
        name = f"linear{position}"
        result = Value(f"{name}.out", TOKENS, out, sharded=is_column)
        ops += linear_ops(name, value, result, training, bias=shape.bias, parallel=parallel)
        value = result
        if position + 1 < count:
            value = replace(result, name=f"{name}.active")
            ops.append(Activation(kind="gelu", x=result, y=value))
    return tuple(ops)
