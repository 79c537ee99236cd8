"""Bytes that a layer occupies all step long: weights, gradients and optimizer state.

What comes and goes with each microbatch is `counts.kept_bytes`; what the device itself holds back is
`Device.reserved_bytes`.
"""

from mmplan.cost_models.counts import FP32_BYTES, op_parameters
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.ops import op_trainable
from mmplan.cost_models.shard import Shard
from mmplan.scenario.scenario import DTYPE_BYTES, Dtype, Optimizer


def trained_parameter_bytes(precision: Dtype, optimizer: Optimizer) -> int:
    """Bytes per trained parameter: weight, gradient, and for AdamW two fp32 moments and in 16 bit an fp32 master copy
    (arXiv 1910.02054, section 3.1: 2 + 2 + 12, here with gradients in `gradient_dtype`)."""
    weight, gradient = DTYPE_BYTES[precision], DTYPE_BYTES[optimizer.gradient_dtype]
    moments = 2 * FP32_BYTES if optimizer.name == "adamw" else 0
    master = FP32_BYTES if optimizer.name == "adamw" and precision != "fp32" else 0
    return weight + gradient + moments + master


def state_bytes(layer: Layer, precision: Dtype, optimizer: Optimizer, shard: int | Shard = 1) -> int:
    """Bytes of a layer's weights, gradients and optimizer state on each rank.

    Frozen parameters cost their weight alone. A tied head counts as a copy of its own: where table and head lie in
    one stage this is one matrix too much.
    """
    trained = trained_parameter_bytes(precision, optimizer)
    frozen = DTYPE_BYTES[precision]
    return sum(op_parameters(op, shard) * (trained if op_trainable(op) else frozen) for op in layer.ops)
