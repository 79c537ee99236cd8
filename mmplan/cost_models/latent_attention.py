"""Multi-head latent attention: queries and keys/values pass through narrow projections (DeepSeek-V2, arXiv 2405.04434,
section 2.1), as it is trained: keys and values are expanded, nothing is absorbed.
"""

from dataclasses import replace

from mmplan.cost_models.blocks import gating_ops, linear_ops, out_gate
from mmplan.cost_models.ops import Attention, JoinHeads, Norm, Op, Rope, Slice
from mmplan.cost_models.values import TOKENS, Rows, Value
from mmplan.scenario.attention_forms import Mla
from mmplan.scenario.scenario import Training, Transformer


def mla_ops(shape: Transformer, mla: Mla, training: Training, x: Value, window: int | None) -> tuple[Op, ...]:
    """x [tokens, hidden], normed -> value `attn_out`, without the residual."""
    query, queries = _query_ops(shape, mla, training, x)
    key, value, keys = _key_value_ops(shape, mla, training, x)
    attended = Value("attended", TOKENS, shape.heads * mla.v_dim, sharded=True, unit=mla.v_dim)
    attention = Attention(
        q=query,
        k=key,
        v=value,
        y=attended,
        heads=shape.heads,
        kv_heads=shape.heads,
        head_dim=mla.qk_nope + mla.qk_rope,
        value_dim=mla.v_dim,
        causal=shape.causal,
        pairs=Rows("window_pairs" if window else "pairs"),
        window=window,
        sliding=shape.sliding,
    )
    gating: tuple[Op, ...] = ()
    if shape.out_gate is not None:
        gate = out_gate(shape, mla.v_dim)
        gating = linear_ops(gate.name, x, gate, training, bias=shape.qkv_bias, parallel="column")
        gating += gating_ops(shape, gate, attended)
        attended = gating[-1].y
    out = Value("attn_out", TOKENS, shape.hidden)
    project = linear_ops("o", attended, out, training, bias=shape.out_bias, parallel="row")
    return (*queries, *keys, attention, *gating, *project)


def _query_ops(shape: Transformer, mla: Mla, training: Training, x: Value) -> tuple[Value, tuple[Op, ...]]:
    head = mla.qk_nope + mla.qk_rope
    q = Value("q", TOKENS, shape.heads * head, sharded=True, unit=head)
    rotated = replace(q, name="q_rotated")
    rope = Rope(x=q, y=rotated, heads=shape.heads, dims=mla.qk_rope)
    if mla.q_lora is None:
        return rotated, (*linear_ops("q", x, q, training, bias=shape.qkv_bias, parallel="column"), rope)
    low = Value("q_low", TOKENS, mla.q_lora)
    normed = replace(low, name="q_low_normed")
    return rotated, (
        *linear_ops("q_down", x, low, training, bias=shape.qkv_bias),
        Norm(name="q_norm", x=low, y=normed, kind="rms", trainable=training.mode == "full"),
        *linear_ops("q_up", normed, q, training, bias=False, parallel="column"),
        rope,
    )


def _key_value_ops(shape: Transformer, mla: Mla, training: Training, x: Value) -> tuple[Value, Value, tuple[Op, ...]]:
    heads, both = shape.heads, mla.qk_nope + mla.v_dim
    low = Value("kv_low", TOKENS, mla.kv_lora + mla.qk_rope)
    latent, normed = (Value(name, TOKENS, mla.kv_lora) for name in ("latent", "latent_normed"))
    shared, rotated = (Value(name, TOKENS, mla.qk_rope) for name in ("k_shared", "k_shared_rotated"))
    wide = Value("kv", TOKENS, heads * both, sharded=True, unit=both)
    own = Value("k_own", TOKENS, heads * mla.qk_nope, sharded=True, unit=mla.qk_nope)
    v = Value("v", TOKENS, heads * mla.v_dim, sharded=True, unit=mla.v_dim)
    head = mla.qk_nope + mla.qk_rope
    k = Value("k", TOKENS, heads * head, sharded=True, unit=head)
    return (
        k,
        v,
        (
            *linear_ops("kv_down", x, low, training, bias=shape.qkv_bias),
            Slice(x=low, y=latent, start=0),
            Norm(name="kv_norm", x=latent, y=normed, kind="rms", trainable=training.mode == "full"),
            *linear_ops("kv_up", normed, wide, training, bias=False, parallel="column"),
            Slice(x=low, y=shared, start=mla.kv_lora),
            Rope(x=shared, y=rotated, heads=1),
            Slice(x=wide, y=own, start=0, groups=heads),
            Slice(x=wide, y=v, start=mla.qk_nope, groups=heads),
            JoinHeads(a=own, b=rotated, y=k, heads=heads),
        ),
    )
