"""Minimal bytes that an operator moves through device memory: each input read once, each output written once.

For matrix products these bytes matter at small row counts only; point-wise operators take no other time.
"""

from mmplan.cost_models.counts import FP32_BYTES, op_parameters
from mmplan.cost_models.delta_ops import CausalConv, DeltaRule
from mmplan.cost_models.expert_ops import GroupedLinear
from mmplan.cost_models.load import Load
from mmplan.cost_models.ops import (
    Activation,
    Attention,
    Conv1d,
    Conv2d,
    Convolution,
    CrossEntropy,
    Embedding,
    Linear,
    MergeRows,
    Multiply,
    Norm,
    Op,
    Slice,
    Stored,
    op_inputs,
)
from mmplan.cost_models.recorded_ops import Entered, HeldWeights, RecordedRest
from mmplan.cost_models.shard import Shard


def forward_bytes(op: Op, load: Load, dtype_bytes: int, shard: int | Shard = 1) -> float:
    """Bytes read and written by the forward pass on each rank; 0.0 when there are no rows."""
    if op.y.rows.of(load) == 0:
        return 0.0
    read = sum(value.elements(load, shard) for value in op_inputs(op))
    written = op.y.elements(load, shard)
    match op:
        case RecordedRest():
            return op.moved.elements(load, shard) * dtype_bytes
        case MergeRows() | Stored() | HeldWeights() | Entered():
            return 0.0  # a view, or numbers too few to count
        case CrossEntropy():
            return read * (dtype_bytes + FP32_BYTES)  # logits in, fp32 log-probabilities out
        case Embedding() | Slice():
            return 2 * written * dtype_bytes
        case Linear() | GroupedLinear() | Conv1d() | Conv2d() | Convolution():
            return (read + written + op_parameters(op, shard)) * dtype_bytes
        case _:
            return (read + written) * dtype_bytes


def backward_bytes(op: Op, load: Load, dtype_bytes: int, shard: int | Shard = 1) -> float:
    """Bytes read and written by the input gradients on each rank; 0.0 when there are no rows."""
    if op.y.rows.of(load) == 0:
        return 0.0
    read = sum(value.elements(load, shard) for value in op_inputs(op))
    written = op.y.elements(load, shard)
    match op:
        case RecordedRest():  # saved inputs and gradients of outputs in, gradients of inputs out
            return 2 * op.moved.elements(load, shard) * dtype_bytes
        case MergeRows() | Stored() | HeldWeights() | Entered():
            return 0.0
        case CrossEntropy():
            return read * (dtype_bytes + FP32_BYTES)
        case Linear() | GroupedLinear() | Conv1d() | Conv2d() | Convolution():
            return (read + written + op_parameters(op, shard)) * dtype_bytes
        case Attention():
            return (2 * read + 2 * written) * dtype_bytes  # q, k, v, output and its gradient in; three gradients out
        case Activation() | Multiply() | Norm() | CausalConv() | DeltaRule():
            return (2 * read + written) * dtype_bytes  # saved inputs and output gradient in, input gradients out
        case _:
            return (read + written) * dtype_bytes
