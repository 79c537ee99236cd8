"""Seconds of single operators on one rank: matrix products, attention, point-wise work.

The vocabulary layer runs in 16 bit also in FP8 training (TransformerEngine keeps it outside fp8_autocast), and FP8
costs casts of the inputs of each block product.
"""

from mmplan.cost_models.attention_time import BACKWARD_RATE, fused_attention_s, math_attention_s, score_bytes
from mmplan.cost_models.counts import op_dgrad_flops, op_parameters, product_flops
from mmplan.cost_models.delta_ops import DeltaRule
from mmplan.cost_models.expert_ops import Combine, Dispatch, GroupedLinear
from mmplan.cost_models.gemm import alignment, gemm_s
from mmplan.cost_models.layer import Layer, splits_rows
from mmplan.cost_models.load import Load
from mmplan.cost_models.ops import (
    Attention,
    Conv1d,
    Conv2d,
    Convolution,
    CrossEntropy,
    Embedding,
    Linear,
    Op,
    op_inputs,
    op_trainable,
)
from mmplan.cost_models.recorded_ops import RecordedProduct, RecordedRest
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.time_rules import DGRAD, FORWARD, PART, WGRAD, Rules, Seconds
from mmplan.cost_models.traffic import backward_bytes, forward_bytes
from mmplan.cost_models.values import CONTEXT, split

# Bytes per logit: `plain` casts to fp32 (6), takes log-softmax (8) and its gradient (8) and casts back (6), minus what
# fusion of neighbours saves (4); `fused` and `chunked` read logits twice and write the gradient once (arXiv 2410.10989,
# section 3.2), `chunked` computes logits twice (head product again).
_LOGIT_BYTES = {"plain": (12, 12), "fused": (4, 2), "chunked": (4, 2)}
# A cast to FP8 reads 16 bit, writes 8 bit and a transposed copy (TransformerEngine cast_transpose); a scale from the
# tensor itself needs a pass for its maximum before.
_FP8_CAST_BYTES = {"tensor": 4, "block": 6, "mx": 6}


def _is_vocabulary(layer: Layer) -> bool:
    return layer.kind in ("head", "loss")


def has_dgrad(layer: Layer, op: Op) -> bool:
    return any(value.name in layer.grad_values for value in op_inputs(op))


Product = Linear | GroupedLinear | Conv1d | Conv2d | Convolution


def add_product(seconds: Seconds, rules: Rules, layer: Layer, op: Product, load: Load, shard: Shard) -> None:
    rows, inner, outer = op.x.local_rows(load, shard), op.x.local_width(shard), op.y.local_width(shard)
    groups = 1
    if isinstance(op, GroupedLinear):
        groups = split(op.experts, 1, shard.ep)
        rows /= groups
    elif isinstance(op, Conv1d):
        rows, inner = op.y.local_rows(load, shard), op.kernel * op.x.width
    elif isinstance(op, Conv2d):
        rows, inner, outer = op.y.local_rows(load, shard) * op.bins, 9 * op.inputs, op.outputs
    elif isinstance(op, Convolution):
        rows, groups = (op.x if op.transposed else op.y).local_rows(load, shard), op.groups
        inner, outer = op.inner, op.y.width // op.groups
    vocabulary = _is_vocabulary(layer)
    part = PART["vocabulary" if vocabulary else "gemm"]
    in_blocks = layer.kind in ("block", "cross_block") and not layer.no_fp8
    rate, size = rules.block_rate if in_blocks else (rules.rate_flops_per_s, float(rules.element_bytes))
    device, with_dgrad, trained = rules.device, has_dgrad(layer, op), op_trainable(op)
    rate *= alignment(device, inner * size, outer * size)
    seconds[FORWARD, part] += gemm_s(rows, outer, inner, device, rate, size, groups)
    if with_dgrad:
        seconds[DGRAD, part] += gemm_s(rows, inner, outer, device, rate, size, groups)
    if trained:
        seconds[WGRAD, part] += gemm_s(inner, outer, rows, device, rate, size, groups)
        moved = rules.stack.accumulation_bytes * op_parameters(op, shard) * rules.gradient_bytes / 4
        seconds[WGRAD, PART["pointwise"]] += moved / rules.pointwise_bytes_per_s
    if in_blocks and rules.technique.fp8 != "none":
        _add_casts(seconds, rules, op, rows * groups * inner, rows * groups * outer, with_dgrad, trained)


def add_recorded(seconds: Seconds, rules: Rules, layer: Layer, op: RecordedProduct, load: Load, shard: Shard) -> None:
    """A product of a recorded layer; each operand that has a gradient costs another, and so does a trained weight."""
    part, size = PART["gemm"], float(rules.element_bytes)
    rows, inner, outer, groups = op.sizes(load, shard.tp)
    rate = rules.rate_flops_per_s * alignment(rules.device, inner * size, outer * size)
    seconds[FORWARD, part] += gemm_s(rows, outer, inner, rules.device, rate, size, groups)
    if has_dgrad(layer, op):
        seconds[DGRAD, part] += op.operands * gemm_s(rows, inner, outer, rules.device, rate, size, groups)
    if op.trainable:
        seconds[WGRAD, part] += gemm_s(inner, outer, rows, rules.device, rate, size, groups)
        moved = rules.stack.accumulation_bytes * groups * inner * outer * rules.gradient_bytes / 4
        seconds[WGRAD, PART["pointwise"]] += moved / rules.pointwise_bytes_per_s


def _add_casts(
    seconds: Seconds,
    rules: Rules,
    op: Product,
    inputs: float,
    outputs: float,
    with_dgrad: bool,
    trained: bool,
) -> None:
    """Casts to FP8 of a product's input forward and of its output's gradient backward.

    A norm writes its result in FP8 itself (TransformerEngine LayerNormLinear, LayerNormMLP); the transposed copy is for
    the weight gradient alone.
    """
    size = _FP8_CAST_BYTES[rules.technique.fp8] - (0 if trained else 1)
    after_norm = op.x.name.endswith("normed")
    seconds[FORWARD, PART["pointwise"]] += (0 if after_norm else size) * inputs / rules.pointwise_bytes_per_s
    if with_dgrad or trained:
        seconds[DGRAD, PART["pointwise"]] += size * outputs / rules.pointwise_bytes_per_s


def add_attention(seconds: Seconds, rules: Rules, layer: Layer, op: Attention, load: Load, shard: Shard) -> None:
    part, device, technique = PART["attention"], rules.device, rules.technique
    flops = product_flops(op, load, shard)
    with_dgrad = has_dgrad(layer, op)
    heads = op.q.local_width(shard) // op.head_dim
    tokens = op.q.local_rows(load, shard)
    pairs = flops / (2 * heads * op.product_width)
    if technique.attention == "math":
        length = pairs / tokens if tokens else 0.0
        batch = heads * (tokens / length if length else 0.0)
        products = math_attention_s(length, length, op.head_dim, batch, device, rules.rate_flops_per_s)
        forward = score_bytes(pairs * heads, technique.dropout, backward=False) / rules.pointwise_bytes_per_s
        backward = score_bytes(pairs * heads, technique.dropout, backward=True) / rules.pointwise_bytes_per_s
        seconds[FORWARD, part] += products + forward
        if with_dgrad:
            seconds[DGRAD, part] += 2 * products + backward
    else:
        once = fused_attention_s(
            flops, pairs, tokens, op.head_dim, op.causal, device, technique.attention, rules.peak_flops_per_s
        )
        seconds[FORWARD, part] += once
        if with_dgrad:
            again = (2 * op.product_width + op.head_dim) / op.product_width  # five products for the forward two's
            seconds[DGRAD, part] += again * once / BACKWARD_RATE


def add_delta(seconds: Seconds, rules: Rules, layer: Layer, op: DeltaRule, load: Load, shard: Shard) -> None:
    """Linear attention: its products in chunks at the rate of fused attention, or the traffic of its inputs and outputs
    where that takes longer. No kernel of it has been measured here."""
    part, device = PART["attention"], rules.device
    fraction = dict(device.attention).get(rules.technique.attention, device.attention_fraction)
    rate = rules.peak_flops_per_s * fraction
    once = product_flops(op, load, shard)
    moved = forward_bytes(op, load, rules.element_bytes, shard) / rules.pointwise_bytes_per_s
    seconds[FORWARD, part] += max(once / rate, moved, device.launch_s)
    if has_dgrad(layer, op):
        moved = backward_bytes(op, load, rules.element_bytes, shard) / rules.pointwise_bytes_per_s
        again = op_dgrad_flops(layer, op, load, shard)
        seconds[DGRAD, part] += max(again / (rate * BACKWARD_RATE), moved, device.launch_s)


def add_pointwise(seconds: Seconds, rules: Rules, layer: Layer, op: Op, load: Load, shard: Shard) -> None:
    part = PART["vocabulary" if _is_vocabulary(layer) else "pointwise"]
    size, rate, floor = rules.element_bytes, rules.pointwise_bytes_per_s, rules.device.launch_s
    if isinstance(op, RecordedRest):
        floor *= op.kernels
    if isinstance(op, CrossEntropy):
        forward, backward = _LOGIT_BYTES[rules.technique.cross_entropy]
        logits = op.x.elements(load, shard)
        seconds[FORWARD, part] += max(forward * logits / rate, floor)
        if has_dgrad(layer, op):
            seconds[DGRAD, part] += max(backward * logits / rate, floor)
        return
    whole = not op.y.sharded and not op.y.routed and op.y.rows != CONTEXT
    share = shard.tp if whole and rules.technique.sequence_parallel and splits_rows(layer) else 1
    passes = 1
    if isinstance(op, Dispatch | Combine) and shard.ep > 1:
        passes = 2  # sorted by rank before the exchange, by expert after it (Megatron Core, MoEAlltoAllTokenDispatcher)
    moved = passes * forward_bytes(op, load, size, shard) / share
    if moved:
        seconds[FORWARD, part] += max(moved / rate, floor)
    if has_dgrad(layer, op):
        moved = passes * backward_bytes(op, load, size, shard) / share
        if moved:
            seconds[DGRAD, part] += max(moved / rate, floor)
    if isinstance(op, Embedding) and op.trainable:
        rows = op.y.elements(load, shard) * (2 * rules.gradient_bytes + size)
        seconds[WGRAD, part] += max(rows / rate, floor)
