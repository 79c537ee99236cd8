"""The operators of attention, MLP and projectors, from the dimensions in a scenario.

Transformer blocks as in ViT (arXiv 2010.11929), LLaMA (2302.13971), Whisper (2212.04356) and the gated
cross-attention layers of Llama 3.2; tensor parallelism as in Megatron (1909.08053): column then row.
"""

from dataclasses import replace
from typing import Literal

from mmplan.cost_models.head_groups import HeadGroups
from mmplan.cost_models.ops import Activation, Add, Attention, Linear, MergeRows, Multiply, Norm, Op, Pool, Rope, Scale
from mmplan.cost_models.values import CONTEXT, TOKENS, Parallel, Rows, Value
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
    shape: Transformer,
    training: Training,
    normed: Value,
    *,
    rope: bool,
    window: int | None,
    context: Value | None,
    prefix: str = "",
    shared: bool = False,
) -> tuple[Op, ...]:
    """Projections, attention, output projection: normed [tokens, hidden] -> value `attn_out`. Names and values of a
    second attention in the same block get a prefix; `shared` keys and values are those of an earlier block."""
    trained = training.mode == "full"
    source, head = context or normed, shape.head_dim
    query_width, key_width = shape.heads * head, shape.kv_heads * head
    groups = HeadGroups(shape.heads, shape.kv_heads)
    q = Value(f"{prefix}q", TOKENS, query_width, sharded=True, unit=head, heads=groups)
    k = Value(f"{prefix}k", source.rows, key_width, sharded=True, unit=head, heads=groups)
    v = replace(k, name=f"{prefix}v")
    ops: list[Op] = [*linear_ops(q.name, normed, q, training, bias=shape.qkv_bias, parallel="column")]
    if not shared:
        ops += linear_ops(k.name, source, k, training, bias=shape.qkv_bias and shape.key_bias, parallel="column")
    if shape.keys_as_values:
        v = k
    elif not shared:
        ops += linear_ops(v.name, source, v, training, bias=shape.qkv_bias, parallel="column")
    gate = out_gate(shape, head, prefix)
    if shape.out_gate is not None:
        ops += linear_ops(gate.name, normed, gate, training, bias=shape.qkv_bias, parallel="column")
    if shape.qk_norm:
        q, k, plain_q, plain_k = replace(q, name=f"{q.name}_normed"), replace(k, name=f"{k.name}_normed"), q, k
        parts = (1, 1) if shape.qk_norm_whole else (shape.heads, shape.kv_heads)
        kind = shape.qk_norm_kind or shape.norm
        ops.append(replace(_norm(shape, f"{prefix}q_norm", plain_q, q, trained, parts[0]), kind=kind))
        if not shared:
            ops.append(replace(_norm(shape, f"{prefix}k_norm", plain_k, k, trained, parts[1]), kind=kind))
    if rope and context is None:
        q, k, plain_q, plain_k = replace(q, name=f"{prefix}q_rotated"), replace(k, name=f"{prefix}k_rotated"), q, k
        ops.append(Rope(x=plain_q, y=q, heads=shape.heads))
        if not shared:
            ops.append(Rope(x=plain_k, y=k, heads=shape.kv_heads))
    attended = replace(q, name=f"{prefix}attended")
    attention = Attention(
        q=q,
        k=k,
        v=v,
        y=attended,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=head,
        causal=shape.causal and context is None,
        pairs=Rows("context_pairs" if context else "window_pairs" if window else "pairs"),
        window=window,
        sliding=shape.sliding,
        cross=context is not None,
    )
    ops.append(attention)
    if shape.out_gate is not None:
        ops += gating_ops(shape, gate, attended, prefix)
        attended = ops[-1].y
    out = Value(f"{prefix}attn_out", TOKENS, shape.hidden)
    return (*ops, *linear_ops(f"{prefix}o", attended, out, training, bias=shape.out_bias, parallel="row"))


def out_gate(shape: Transformer, head: int, prefix: str = "") -> Value:
    """What opens attention's output: a number for each column of a head, or for each head."""
    unit = 1 if shape.out_gate == "head" else head
    groups = HeadGroups(shape.heads, shape.heads if shape.mla is not None else shape.kv_heads)
    return Value(f"{prefix}out_gate", TOKENS, shape.heads * unit, sharded=True, unit=unit, heads=groups)


def gating_ops(shape: Transformer, gate: Value, attended: Value, prefix: str = "") -> tuple[Op, ...]:
    """attended times the sigmoid of the gate."""
    opened, gated = replace(gate, name=f"{prefix}out_gate_open"), replace(attended, name=f"{prefix}attended_gated")
    parts = shape.heads if shape.out_gate == "head" else 0
    return Activation(kind="sigmoid", x=gate, y=opened), Multiply(a=attended, b=opened, y=gated, groups=parts)


def _norm(shape: Transformer, name: str, x: Value, y: Value, trained: bool, groups: int) -> Norm:
    return Norm(name=name, x=x, y=y, kind=shape.norm, trainable=trained, groups=groups, bias=shape.norm_bias)


def mlp_body(
    shape: Transformer, training: Training, x: Value, y: Value, width: int, *, prefix: str = ""
) -> tuple[Op, ...]:
    """Up (and gate), activation, down: x -> y. Names and values of shared experts get a prefix."""
    names = (f"{prefix}{name}" for name in ("up", "gate", "active", "product"))
    up, gate, active, product = (Value(name, TOKENS, width, sharded=True) for name in names)
    ops: list[Op] = [*linear_ops(up.name, x, up, training, bias=shape.mlp_bias, parallel="column")]
    if shape.gated_mlp:
        ops += linear_ops(gate.name, x, gate, training, bias=shape.mlp_bias, parallel="column")
        ops += [Activation(kind=shape.mlp_activation, x=gate, y=active), Multiply(a=active, b=up, y=product)]
    else:
        ops.append(Activation(kind=shape.mlp_activation, x=up, y=active))
        product = active
    return (*ops, *linear_ops(f"{prefix}down", product, y, training, bias=shape.mlp_bias, parallel="row"))


def residual_ops(
    shape: Transformer, training: Training, part: str, x: Value, branch: Value, y: Value
) -> tuple[Op, ...]:
    """Norm and learned scale of what a branch gives, where the model has them, then the sum: x + branch -> y."""
    ops: list[Op] = []
    trained = training.mode == "full"
    if shape.post_norms:
        normed = replace(branch, name=f"{part}_out_normed")
        ops.append(_norm(shape, f"{part}_post_norm", branch, normed, trained, 1))
        branch = normed
    if shape.layer_scale:
        scaled = replace(branch, name=f"{part}_out_scaled")
        ops.append(Scale(name=f"{part}_scale", x=branch, y=scaled, trainable=trained))
        branch = scaled
    return (*ops, Add(a=x, b=branch, y=y))


def projector_ops(shape: Projector, training: Training, width: int) -> tuple[Op, ...]:
    """Pool, merge, norm, linears with GELU between them: x [context_tokens, width] -> [tokens, dims[-1]].

    Pairs of linears are column- then row-parallel; a last odd one is whole on every rank.
    """
    trained = training.mode == "full"
    value, ops = Value("x", CONTEXT, width), list[Op]()

    def norm(kind: Literal["layer", "rms"], x: Value) -> Value:
        y = Value("normed", x.rows, x.width)
        ops.append(Norm(name="norm", x=x, y=y, kind=kind, trainable=trained))
        return y

    if shape.pool > 1:
        pooled = Value("pooled", Rows("tokens", times=shape.merge), width)
        ops.append(Pool(x=value, y=pooled, size=shape.pool))
        value = pooled
    if shape.norm is not None and shape.norm_before_merge:
        value = norm(shape.norm, value)
    merged = Value("merged", TOKENS, value.width * shape.merge)
    ops.append(MergeRows(x=value, y=merged, merge=shape.merge))
    value = merged
    if shape.norm is not None and not shape.norm_before_merge:
        value = norm(shape.norm, value)
    return (*ops, *_projector_linears(shape, training, value))


def _projector_linears(shape: Projector, training: Training, value: Value) -> tuple[Op, ...]:
    ops: list[Op] = []
    count = len(shape.dims) - 1
    for position, out in enumerate(shape.dims[1:]):
        is_column, is_row = position % 2 == 0 and position + 1 < count, position % 2 == 1
        parallel: Parallel = "column" if is_column else "row" if is_row else "none"
        name, x = f"linear{position}", value
        result = Value(f"{name}.out", TOKENS, out, sharded=is_column)
        ops += linear_ops(name, x, result, training, bias=shape.bias, parallel=parallel)
        for further in range(1, shape.reads if position == 0 else 1):
            part, total = (replace(result, name=f"{name}.{what}{further}") for what in ("part", "sum"))
            ops += linear_ops(f"{name}_{further}", x, part, training, bias=False, parallel=parallel)
            ops.append(Add(a=result, b=part, y=total))
            result = total
        value = result
        if shape.gated and position == count - 2:
            gate, active = (replace(result, name=f"gate.{part}") for part in ("out", "active"))
            ops += linear_ops("gate", x, gate, training, bias=shape.bias, parallel=parallel)
            value = replace(result, name="product")
            ops += [Activation(kind="silu", x=gate, y=active), Multiply(a=active, b=result, y=value)]
        elif position + 1 < count:
            value = replace(result, name=f"{name}.active")
            ops.append(Activation(kind="gelu", x=result, y=value))
    return tuple(ops)
