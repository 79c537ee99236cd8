"""FLOPs, parameters and bytes of a layer on one rank: one question per function, one rule per operator.

`shard` is a tensor-parallel degree or a `Shard`; the default 1 gives whole layers.

FLOPs are those of matrix products (2 per multiply-add), counted as torch's FlopCounterMode does: attention over all
query-key pairs whether causal or not, its backward with recomputed scores (5 products for the forward's 2).
"""

import math
from dataclasses import replace

from mmplan.cost_models.delta_ops import CausalConv, DeltaRule
from mmplan.cost_models.expert_ops import Combine, GroupedLinear, Route
from mmplan.cost_models.graph import Edge
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load, Loads
from mmplan.cost_models.ops import (
    Activation,
    Attention,
    ClassToken,
    Conv1d,
    Conv2d,
    Convolution,
    CrossEntropy,
    Embedding,
    Linear,
    Multiply,
    Norm,
    Op,
    Positions,
    Scale,
    Stored,
    op_inputs,
    op_trainable,
)
from mmplan.cost_models.recorded_ops import HeldWeights, RecordedProduct, RecordedRest
from mmplan.cost_models.shard import Shard, as_shard
from mmplan.cost_models.values import Rows, Value, row_fraction, split
from mmplan.scenario.scenario import DTYPE_BYTES, Dtype

FP32_BYTES = 4


def product_flops(op: Op, load: Load, shard: int | Shard = 1) -> float:
    """FLOPs of an operator's forward matrix products on one rank."""
    match op:
        case Linear() | GroupedLinear():
            return 2 * op.x.local_rows(load, shard) * op.x.local_width(shard) * op.y.local_width(shard)
        case Conv1d():
            return 2 * op.y.local_rows(load, shard) * op.kernel * op.x.width * op.y.width
        case Conv2d():
            return 2 * op.y.local_rows(load, shard) * op.bins * 9 * op.inputs * op.outputs
        case Convolution():
            rows = (op.x if op.transposed else op.y).local_rows(load, shard)
            return 2 * rows * op.inner * op.y.width
        case RecordedProduct():
            rows, inner, outer, groups = op.sizes(load, as_shard(shard).tp)
            return 2 * groups * rows * inner * outer
        case DeltaRule():
            rows = load.chunk_tokens * row_fraction(False, as_shard(shard))
            return rows * op.step.local_width(shard) * op.row_flops()
        case Attention():
            pairs = op.pairs.of(load) * row_fraction(False, as_shard(shard))
            return 2 * pairs * (op.q.local_width(shard) // op.head_dim) * op.product_width
        case _:
            return 0.0


def op_dgrad_flops(layer: Layer, op: Op, load: Load, shard: int | Shard = 1) -> float:
    """FLOPs of the gradient with respect to the operator's inputs; zero when none of them carries one."""
    if not any(value.name in layer.grad_values for value in op_inputs(op)):
        return 0.0
    flops = product_flops(op, load, shard)
    if isinstance(op, Attention):  # q k^T again, gradients of q and k; gradients of v and of the weights
        return flops * (2 * op.product_width + op.head_dim) / op.product_width
    if isinstance(op, DeltaRule):  # the forward again, twice as much for gradients, two products for the solved system
        rows = load.chunk_tokens * row_fraction(False, as_shard(shard))
        return 3 * flops + rows * op.step.local_width(shard) * op.solve_flops()
    if isinstance(op, RecordedProduct):
        return flops * op.operands
    return flops


def op_wgrad_flops(op: Op, load: Load, shard: int | Shard = 1) -> float:
    """FLOPs of the gradient with respect to the operator's weights; zero when they are frozen."""
    return product_flops(op, load, shard) if op_trainable(op) and not isinstance(op, DeltaRule) else 0.0


def forward_flops(layer: Layer, load: Load, shard: int | Shard = 1) -> float:
    """FLOPs of the forward pass on each rank."""
    return sum(product_flops(op, load, shard) for op in layer.ops)


def dgrad_flops(layer: Layer, load: Load, shard: int | Shard = 1) -> float:
    """FLOPs of all input gradients, inner ones included, on each rank."""
    return sum(op_dgrad_flops(layer, op, load, shard) for op in layer.ops)


def wgrad_flops(layer: Layer, load: Load, shard: int | Shard = 1) -> float:
    """FLOPs of all weight gradients on each rank."""
    return sum(op_wgrad_flops(op, load, shard) for op in layer.ops)


def op_parameters(op: Op, shard: int | Shard = 1) -> int:
    """Parameters of an operator on one rank, tied ones included."""
    match op:
        case Linear():
            return op.x.local_width(shard) * op.y.local_width(shard) + (op.y.local_width(shard) if op.bias else 0)
        case GroupedLinear():
            return split(op.experts, 1, as_shard(shard).ep) * op.x.local_width(shard) * op.y.local_width(shard)
        case Conv1d():
            return op.kernel * op.x.width * op.y.width + op.y.width
        case Conv2d():
            return 9 * op.inputs * op.outputs + op.outputs
        case Convolution():
            return op.inner * op.y.width + (op.y.width if op.bias else 0)
        case Norm():
            scale = min(op.x.width // op.groups, op.x.local_width(shard))
            return scale * (2 if op.kind == "layer" and op.bias else 1)
        case CausalConv():
            return op.kernel * op.x.local_width(shard)
        case DeltaRule():
            return op.gate.local_width(shard) + (2 if op.scan else 1) * op.step.local_width(shard)
        case HeldWeights():
            return op.on_rank(as_shard(shard).tp)
        case Stored():
            return op.size
        case Embedding():
            return split(op.size, op.unit, as_shard(shard).tp) * op.y.width
        case ClassToken() | Scale():
            return op.y.width
        case Positions():
            return op.size * op.y.width
        case _:
            return 0


def op_copied_parameters(op: Op, shard: int | Shard = 1) -> int:
    """Those of them that other ranks of the shard have too: all that is not split, key heads that lie on several."""
    if isinstance(op, Linear) and op.y.local_width(shard) == op.y.width != 0 and op.x.local_width(shard) != op.x.width:
        return op.y.width if op.bias else 0
    whole = op_parameters(op)
    if isinstance(op, HeldWeights) and (tp := as_shard(shard).tp) > 1:  # a rank has these, and its part of the others
        return (tp * op_parameters(op, shard) - whole) // (tp - 1)
    if isinstance(op, Linear) and op.y.copies(shard) > 1:
        return op_parameters(op, shard)
    return whole if op_parameters(op, shard) == whole else 0


def is_tied(op: Op) -> bool:
    """Whether the operator's matrix is counted at another operator."""
    return isinstance(op, Linear | Embedding) and op.tied


def parameters(layer: Layer) -> int:
    """Parameters of the layer; a tied head counts none, its matrix is the token table's."""
    return sum(op_parameters(op) for op in layer.ops if not is_tied(op))


def trainable_parameters(layer: Layer) -> int:
    """Parameters of the layer that are trained, tied ones not counted."""
    return sum(op_parameters(op) for op in layer.ops if op_trainable(op) and not is_tied(op))


def saved_values(layer: Layer, op: Op) -> tuple[Value, ...]:
    """Values that autograd keeps for an operator's backward (derivatives.yaml of torch)."""
    grad = {value.name for value in op_inputs(op)} & set(layer.grad_values)
    match op:
        case Linear() | GroupedLinear() | Scale():
            return (op.x,) if op.trainable else ()
        case Conv1d() | Conv2d() | Convolution() | Norm() | CausalConv():
            return (op.x,) if op.trainable or grad else ()
        case DeltaRule():
            return (op.q, op.k, op.v, op.gate, op.step) if op.trainable or grad else ()
        case Attention():
            return (op.q, op.k, op.v, op.y) if grad and not op.kept_apart else ()
        case RecordedRest():
            return (op.kept_value(layer.grad_values),)
        case Activation():
            return (op.y if op.kind == "sigmoid" else op.x,) if grad else ()
        case Multiply():
            return tuple(kept for kept, other in ((op.a, op.b), (op.b, op.a)) if other.name in grad)
        case Combine():
            rows = Rows("tokens", times=op.weights.width)
            gathered = replace(op.x, name="gathered", rows=rows)
            return tuple(kept for kept, other in ((gathered, op.weights), (op.weights, op.x)) if other.name in grad)
        case _:
            return ()


KEEPS_FP32 = (Norm, Attention, Route, CrossEntropy, RecordedRest)


def saved_fp32_elements(layer: Layer, op: Op, load: Load, shard: int | Shard = 1) -> float:
    """fp32 numbers that autograd keeps besides values: norm statistics, log-sum-exp, log-probabilities."""
    if op.y.name not in layer.grad_values:
        return 0.0
    match op:
        case Norm():
            groups = max(1, op.x.local_width(shard) // (op.x.width // op.groups))
            return op.x.local_rows(load, shard) * groups * (2 if op.kind == "layer" else 1)
        case Attention() if op.kept_apart:
            return 0.0
        case RecordedRest():
            return op.kept_bytes(layer.grad_values, load, as_shard(shard).tp) / FP32_BYTES
        case Attention():
            return op.q.local_rows(load, shard) * (op.q.local_width(shard) // op.head_dim)
        case Route():
            kept = {"softmax": op.y.width, "softmax_all": op.x.width, "sigmoid": op.y.width + 1}
            return op.y.local_rows(load, shard) * kept.get(op.kind, op.y.width)
        case CrossEntropy():
            return op.x.elements(load, shard)
        case _:
            return 0.0


def kept_bytes(layer: Layer, load: Load, precision: Dtype, shard: int | Shard = 1) -> int:
    """Bytes of activations that autograd keeps from a layer's forward to its backward, on each rank.

    Counted: every floating-point tensor saved, once, the layer's own inputs and raw pixels included. Not counted:
    parameters, integer indices and labels, and the rotary table, which all layers share. An input that two layers of
    a stage both keep is counted in both. Exact for torch with flash attention where every sequence has context, as on
    CUDA; on CPU in 16 bit layer norm keeps its statistics in 2 bytes instead of 4.
    """
    values = {value.name: value for op in layer.ops for value in saved_values(layer, op)}
    fp32 = sum(saved_fp32_elements(layer, op, load, shard) for op in layer.ops)
    stored = sum(value.elements(load, shard) for value in values.values())
    return math.ceil(stored * DTYPE_BYTES[precision] + fp32 * FP32_BYTES)


def edge_bytes(edge: Edge, loads: Loads, precision: Dtype) -> int:
    """Bytes of one microbatch's tensor on an edge; its gradient has the same size."""
    tokens: float = getattr(loads[edge.load_module], edge.load_field)
    return math.ceil(edge.width * tokens * DTYPE_BYTES[precision])
