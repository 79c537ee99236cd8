"""What stands in place of a block's attention: the gated delta rule (Qwen3-Next, Qwen3.5), LFM2's short convolution.

Projections of queries, keys, values, an output gate and two numbers per value head; a causal convolution and SiLU on
the first three; the rule itself; a norm of each head, times the SiLU of the gate; the output projection.
"""

from dataclasses import replace

from mmplan.cost_models.blocks import linear_ops
from mmplan.cost_models.delta_ops import CausalConv, DeltaRule
from mmplan.cost_models.ops import Activation, Multiply, Norm, Op, Stored
from mmplan.cost_models.values import TOKENS, Value
from mmplan.scenario.attention_forms import GatedDelta
from mmplan.scenario.scenario import Training, Transformer
from mmplan.scenario.steps import Scan


def delta_ops(shape: Transformer, delta: GatedDelta, training: Training, x: Value) -> tuple[Op, ...]:
    """x [tokens, hidden], normed -> value `attn_out`, without the residual."""
    trained = training.mode == "full"
    key, value = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    q, k = (Value(name, TOKENS, key, sharded=True, unit=delta.key_dim) for name in ("q", "k"))
    v, z = (Value(name, TOKENS, value, sharded=True, unit=delta.value_dim) for name in ("v", "z"))
    gate, step = (Value(name, TOKENS, delta.value_heads, sharded=True) for name in ("gate_in", "step_in"))
    ops: list[Op] = []
    if delta.gate_rank:
        gate = replace(gate, width=key, unit=delta.key_dim)
    narrow = (gate, z) if delta.gate_rank else ()
    for projected in (q, k, v, z, gate, step):
        read = x
        if projected in narrow:
            read = Value(f"{projected.name}_low", TOKENS, delta.gate_rank)
            ops += linear_ops(read.name, x, read, training, bias=False)
        ops += linear_ops(projected.name, read, projected, training, bias=False, parallel="column")
    mixed = [replace(part, name=f"{part.name}_mixed") for part in (q, k, v)]
    active = [replace(part, name=f"{part.name}_active") for part in (q, k, v)]
    for part, conv, result in zip((q, k, v), mixed, active, strict=True):
        ops.append(CausalConv(name=f"{part.name}_conv", x=part, y=conv, kernel=delta.conv, trainable=trained))
        ops.append(Activation(kind="silu", x=conv, y=result))
    ruled, normed, opened, gated = (
        replace(v, name=name) for name in ("ruled", "ruled_normed", "z_open", "ruled_gated")
    )
    ops.append(
        DeltaRule(
            name="rule",
            q=active[0],
            k=active[1],
            v=active[2],
            gate=gate,
            step=step,
            y=ruled,
            key_heads=delta.key_heads,
            value_heads=delta.value_heads,
            trainable=trained,
        )
    )
    ops.append(Norm(name="rule_norm", x=ruled, y=normed, kind="rms", trainable=trained, groups=delta.value_heads))
    ops += [Activation(kind="silu", x=z, y=opened), Multiply(a=normed, b=opened, y=gated)]
    out = Value("attn_out", TOKENS, shape.hidden)
    return (*ops, *linear_ops("o", gated, out, training, bias=False, parallel="row"))


def short_conv_ops(shape: Transformer, training: Training, x: Value) -> tuple[Op, ...]:
    """LFM2's short convolution: x [tokens, hidden], normed -> value `attn_out`. Three projections; the first times the
    third passes a causal convolution, is multiplied by the second and projected."""
    gate_in, gate_out, mixed = (
        Value(name, TOKENS, shape.hidden, sharded=True) for name in ("gate_in", "gate_out", "mix")
    )
    opened, turned, gated = (replace(mixed, name=name) for name in ("mix_open", "mix_turned", "mix_gated"))
    ops: list[Op] = []
    for projected in (gate_in, gate_out, mixed):
        ops += linear_ops(projected.name, x, projected, training, bias=shape.qkv_bias, parallel="column")
    kernel, trained = shape.short_conv, training.mode == "full"
    ops.append(Multiply(a=gate_in, b=mixed, y=opened))
    ops.append(CausalConv(name="mix_conv", x=opened, y=turned, kernel=kernel, trainable=trained))
    ops.append(Multiply(a=gate_out, b=turned, y=gated))
    out = Value("attn_out", TOKENS, shape.hidden)
    return (*ops, *linear_ops("o", gated, out, training, bias=shape.out_bias, parallel="row"))


def scan_ops(scan: Scan, hidden: int, training: Training, x: Value, prefix: str) -> tuple[Op, ...]:
    """Mamba 2: x [tokens, hidden], normed -> value `{prefix}out`. Never split over tp ranks."""
    trained, inner, keys = training.mode == "full", scan.heads * scan.head_dim, scan.groups * scan.state
    z, v = (Value(f"{prefix}{name}", TOKENS, inner) for name in ("z", "v"))
    q, k = (Value(f"{prefix}{name}", TOKENS, keys) for name in ("q", "k"))
    step = Value(f"{prefix}step", TOKENS, scan.heads)
    ops: list[Op] = []
    for projected in (z, v, q, k, step):
        ops += linear_ops(projected.name, x, projected, training, bias=scan.bias)
    mixed: list[Value] = []
    for part in (q, k, v):
        conv, active = replace(part, name=f"{part.name}_mixed"), replace(part, name=f"{part.name}_active")
        ops.append(CausalConv(name=f"{part.name}_conv", x=part, y=conv, kernel=scan.kernel, trainable=trained))
        ops.append(Activation(kind="silu", x=conv, y=active))
        mixed.append(active)
    ruled, opened, gated, normed = (replace(v, name=f"{prefix}{name}") for name in ("ruled", "open", "gated", "normed"))
    rule = DeltaRule(
        name=f"{prefix}rule",
        q=mixed[0],
        k=mixed[1],
        v=mixed[2],
        gate=step,
        step=step,
        y=ruled,
        key_heads=scan.groups,
        value_heads=scan.heads,
        trainable=trained,
        scan=scan.chunk,
    )
    ops += [rule, Activation(kind="silu", x=z, y=opened), Multiply(a=ruled, b=opened, y=gated)]
    ops.append(Norm(name=f"{prefix}norm", x=gated, y=normed, kind="rms", trainable=trained))
    if scan.conv_bias:
        kept = replace(normed, name=f"{prefix}kept")
        ops.append(Stored(name=f"{prefix}conv_bias", x=normed, y=kept, size=inner + 2 * keys, trainable=trained))
        normed = kept
    return (*ops, *linear_ops(f"{prefix}o", normed, Value(f"{prefix}out", TOKENS, hidden), training, bias=scan.bias))
