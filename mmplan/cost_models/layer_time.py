"""Seconds of a layer's forward, input gradient, weight gradient and recomputation, each split into named parts."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from mmplan.cost_models.counts import FP32_BYTES
from mmplan.cost_models.delta_ops import DeltaRule
from mmplan.cost_models.expert_ops import GroupedLinear
from mmplan.cost_models.exposed_time import add_cp, add_ep, add_strided, add_tp
from mmplan.cost_models.gemm import STREAM_FRACTION
from mmplan.cost_models.host_offload import copied_activations_s, offloaded_seconds
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.cost_models.op_time import add_attention, add_delta, add_pointwise, add_product, add_recorded
from mmplan.cost_models.ops import (
    Activation,
    Attention,
    Conv1d,
    Conv2d,
    Convolution,
    Linear,
    Multiply,
    Op,
    Stored,
    op_routed,
)
from mmplan.cost_models.recorded_ops import Entered, HeldWeights, RecordedProduct, RecordedRest
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.time_rules import DGRAD, FORWARD, PART, PARTS, PHASES, RECOMPUTE, WGRAD, Rules, Seconds
from mmplan.scenario.scenario import Optimizer

OpSeconds = tuple[Seconds, int]
_BACKWARD_HOST = 1.6  # kernels of a backward per forward operator, fit to single-node runs of small models on A100


def layer_seconds(
    rules: Rules, layer: Layer, load: Load, shard: Shard, of_ops: Callable[[bool], OpSeconds] | None = None
) -> Seconds:
    """Seconds [phase, part] of a layer for one microbatch on one rank; communication is the exposed part.

    Args:
        of_ops: `op_seconds` of the operators that work on routed rows, or of the others, for callers who remember them.
    """
    parts = [of_ops(routed) if of_ops else op_seconds(rules, layer, load, shard, routed) for routed in (False, True)]
    seconds: Seconds = parts[0][0] + parts[1][0]
    add_tp(seconds, rules, layer, load, shard)
    add_ep(seconds, rules, layer, load, shard)
    _add_recompute(seconds, rules, layer)
    _add_host(seconds, rules, parts[0][1] + parts[1][1])
    _add_copies(seconds, copied_activations_s(rules, layer, load, shard))
    return seconds


def op_seconds(rules: Rules, layer: Layer, load: Load, shard: Shard, routed: bool) -> OpSeconds:
    """Seconds [phase, part] of the operators on routed rows, or of all others, without communication between ranks that
    share them, and how many there are. The others do not depend on expert degrees."""
    seconds = np.zeros((len(PHASES), len(PARTS)))
    launches = 0
    if routed and not layer.has_experts:
        return seconds, launches
    for op in _fused(layer, rules, shard):
        if op_routed(op) != routed or op.y.rows.of(load) == 0:
            continue
        launches += 1
        before = seconds.copy() if layer.imbalance > 1 and op_routed(op) else None
        match op:
            case Convolution() if op.groups == op.y.width:
                add_pointwise(seconds, rules, layer, op, load, shard)
            case Linear() | GroupedLinear() | Conv1d() | Conv2d() | Convolution():
                add_product(seconds, rules, layer, op, load, shard)
            case Attention():
                add_attention(seconds, rules, layer, op, load, shard)
                add_cp(seconds, rules, op, load, shard)
            case DeltaRule():
                add_delta(seconds, rules, layer, op, load, shard)
            case RecordedProduct():
                add_recorded(seconds, rules, layer, op, load, shard)
            case Stored() | HeldWeights() | Entered():
                launches -= 1
            case RecordedRest():
                launches += op.kernels - 1
                add_pointwise(seconds, rules, layer, op, load, shard)
            case _:
                add_pointwise(seconds, rules, layer, op, load, shard)
                add_strided(seconds, rules, layer, op, load, shard)
        if before is not None:  # the step waits for the rank with the most rows
            seconds += (layer.imbalance - 1) * (seconds - before)
    return seconds, launches


def optimizer_seconds(rules: Rules, optimizer: Optimizer, parameters: float, wide: float | None = 0.0) -> float:
    """Seconds of an update of so many parameters on one rank: gradient read and cleared, moments and master weights
    read and written, the 16-bit weight written; streaming kernels (Apex FusedAdam, torch fused AdamW). Offloaded states
    are updated on the host, where the link to it is known.

    Args:
        wide: of the parameters those with fp32 weights beside 16-bit ones; None: as many as cost least.
    """
    if parameters == 0:
        return 0.0
    host = rules.device.host_bytes_per_s
    if rules.technique.host_states != "none" and host is not None:
        return max(offloaded_seconds(rules, parameters, host), rules.device.launch_s)
    narrow_bytes, wide_bytes = (
        update_bytes(width, rules.gradient_bytes, optimizer) for width in (rules.element_bytes, FP32_BYTES)
    )
    if wide is None:
        wide = parameters if wide_bytes < narrow_bytes else 0.0
    traffic = narrow_bytes * (parameters - wide) + wide_bytes * wide
    stream = rules.device.memory_bytes_per_s * (rules.device.update_fraction or STREAM_FRACTION)
    return max(traffic / stream, rules.device.launch_s)


def update_bytes(weight_bytes: int, gradient_bytes: int, optimizer: Optimizer) -> int:
    """Bytes that the update of a parameter reads and writes."""
    moments = 2 * FP32_BYTES if optimizer.name == "adamw" else 0
    has_master = optimizer.name == "adamw" and weight_bytes < FP32_BYTES
    weights = 2 * FP32_BYTES + weight_bytes if has_master else 2 * weight_bytes
    return 2 * gradient_bytes + 2 * moments + weights


def _fused(layer: Layer, rules: Rules, shard: Shard) -> Iterator[Op]:
    """Operators as the stack launches them: projections of one input as one product, activation with its gate."""
    ops = layer.ops
    if not rules.stack.fused:
        yield from ops
        return
    position = 0
    while position < len(ops):
        op = ops[position]
        position += 1
        if isinstance(op, Linear) and op.parallel == "column":
            own = op.y.local_width(shard)
            while position < len(ops):
                other = ops[position]
                same = isinstance(other, Linear) and other.x.name == op.x.name and other.trainable == op.trainable
                if not same or not isinstance(other, Linear) or other.parallel != "column":
                    break
                own += other.y.local_width(shard)
                position += 1
            degree = shard.expert_tp if op.y.routed else shard.tp
            yield replace(op, y=replace(op.y, width=own * degree, unit=1, heads=None))
        elif isinstance(op, Activation) and position < len(ops) and isinstance(ops[position], Multiply):
            gate = ops[position]
            position += 1
            assert isinstance(gate, Multiply)
            yield replace(gate, a=op.x)  # reads gate and up, writes the product
        else:
            yield op


def _add_recompute(seconds: Seconds, rules: Rules, layer: Layer) -> None:
    """What a layer's backward computes again; of `full` with a layer count, `estimate.py` takes the share."""
    if layer.kind not in ("block", "cross_block") or seconds[DGRAD].sum() + seconds[WGRAD].sum() == 0:
        return
    if rules.technique.recompute == "full":
        seconds[RECOMPUTE] = seconds[FORWARD]
    elif rules.technique.recompute == "selective":
        seconds[RECOMPUTE] = seconds[FORWARD] * rules.stack.selective_share
        seconds[RECOMPUTE, PART["attention"]] = seconds[FORWARD, PART["attention"]]
        seconds[RECOMPUTE, PART["tp"]] = 0.0


def _add_host(seconds: Seconds, rules: Rules, launches: int) -> None:
    """Where the host needs longer to launch a layer than the device to run it, the device waits."""
    host_s = launches * rules.stack.host_op_s
    if host_s == 0:
        return
    column = PART["host"]
    seconds[FORWARD, column] = max(0.0, host_s - seconds[FORWARD].sum())
    if seconds[RECOMPUTE].sum() > 0:
        seconds[RECOMPUTE, column] = max(0.0, host_s - seconds[RECOMPUTE].sum())
    backward = seconds[DGRAD].sum() + seconds[WGRAD].sum()
    if backward > 0:
        seconds[DGRAD, column] = max(0.0, _BACKWARD_HOST * host_s - backward)


def _add_copies(seconds: Seconds, copied_s: float) -> None:
    """Of copies of activations to the host and back what is longer than the work beside them."""
    backward_s = sum(seconds[phase].sum() for phase in (DGRAD, WGRAD, RECOMPUTE))
    seconds[FORWARD, PART["host"]] += max(0.0, copied_s - seconds[FORWARD].sum())
    if backward_s > 0:
        seconds[DGRAD, PART["host"]] += max(0.0, copied_s - backward_s)
