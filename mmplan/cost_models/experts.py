"""The operators of a mixture of experts in place of a block's MLP.

Router, top-k, rows copied to their experts, one gated MLP per expert, weighted sum (Switch Transformers, arXiv
2101.03961; DeepSeekMoE with shared experts, arXiv 2401.06066). Losses that balance the router are left out: they cost
nothing next to the rest.
"""

from fractions import Fraction

from mmplan.cost_models.blocks import mlp_body
from mmplan.cost_models.expert_ops import Combine, Dispatch, GroupedLinear, Route, TopK
from mmplan.cost_models.ops import Activation, Add, Linear, Multiply, Op
from mmplan.cost_models.values import TOKENS, Rows, Value
from mmplan.scenario.scenario import Moe, Training, Transformer


def routed_rows(moe: Moe) -> Rows:
    """Rows that all experts together compute: topk per token, or every expert's capacity."""
    share = Fraction(moe.topk) * Fraction(moe.capacity_factor or 1).limit_denominator(1000)
    return Rows("tokens", times=share.numerator, per=share.denominator)


def moe_ops(shape: Transformer, moe: Moe, training: Training, x: Value) -> tuple[Op, ...]:
    """x [tokens, hidden], normed -> value `mlp_out`, without the residual."""
    trained = training.mode == "full"
    scores = Value("scores", TOKENS, moe.experts)
    chosen, weights = (Value(name, TOKENS, moe.topk) for name in ("chosen", "weights"))
    routed = Value("routed", routed_rows(moe), shape.hidden, routed=True)
    answer = Value("expert_out", routed.rows, shape.hidden, routed=True)
    capacity = moe.capacity_factor
    out = Value("mlp_out", TOKENS, shape.hidden)
    combined = Value("combined", TOKENS, shape.hidden) if moe.shared_ffn else out
    ops: list[Op] = [
        Linear(name="router", x=x, y=scores, bias=moe.router_bias, trainable=trained),
        TopK(x=scores, y=chosen),
        Route(kind=moe.scoring, x=scores, chosen=chosen, y=weights),
        Dispatch(x=x, chosen=chosen, y=routed, experts=moe.experts, capacity=capacity, imbalance=moe.imbalance),
        *_expert_ops(shape, moe, trained, routed, chosen, answer),
        Combine(x=answer, chosen=chosen, weights=weights, y=combined, experts=moe.experts, capacity=capacity),
    ]
    if moe.shared_ffn:
        shared = Value("shared_out", TOKENS, shape.hidden)
        ops += mlp_body(shape, training, x, shared, moe.shared_ffn, prefix="shared_")
        if moe.shared_gate:
            gate, opened = Value("shared_open_in", TOKENS, 1), Value("shared_open", TOKENS, 1)
            gated = Value("shared_gated", TOKENS, shape.hidden)
            ops.append(Linear(name="shared_open", x=x, y=gate, bias=False, trainable=trained))
            ops.append(Activation(kind="sigmoid", x=gate, y=opened))
            ops.append(Multiply(a=shared, b=opened, y=gated, groups=1))
            shared = gated
        ops.append(Add(a=combined, b=shared, y=out))
    return tuple(ops)


def _expert_ops(shape: Transformer, moe: Moe, trained: bool, x: Value, chosen: Value, y: Value) -> tuple[Op, ...]:
    """The experts' MLPs on routed rows."""

    def linear(name: str, source: Value, result: Value) -> GroupedLinear:
        return GroupedLinear(
            name=f"experts_{name}",
            x=source,
            chosen=chosen,
            y=result,
            experts=moe.experts,
            trainable=trained,
            parallel="row" if name == "down" else "column",
            capacity=moe.capacity_factor,
        )

    names = ("expert_up", "expert_gate", "expert_active", "expert_product")
    up, gate, active, product = (Value(name, x.rows, moe.expert_ffn, sharded=True, routed=True) for name in names)
    if not shape.gated_mlp:
        activation = Activation(kind=shape.mlp_activation, x=up, y=active)
        return (linear("up", x, up), activation, linear("down", active, y))
    return (
        linear("up", x, up),
        linear("gate", x, gate),
        Activation(kind=shape.mlp_activation, x=gate, y=active),
        Multiply(a=active, b=up, y=product),
        linear("down", product, y),
    )
