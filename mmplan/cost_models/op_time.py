"""Seconds of a layer's forward, input gradient, weight gradient and recomputation, each split into named parts.

One rule per operator, for every software stack; what differs stands in `Rules` (device, links, technique, stack). The
vocabulary layer runs in 16 bit also in FP8 training (TransformerEngine keeps it outside fp8_autocast), and FP8 costs
casts of the inputs of each block product.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mmplan.cost_models.attention_time import BACKWARD_RATE, fused_attention_s, math_attention_s, score_bytes
from mmplan.cost_models.collectives import Group, all_reduce_s, all_to_all_s, gather_s, message_s
from mmplan.cost_models.counts import FP32_BYTES, op_parameters, product_flops
from mmplan.cost_models.expert_ops import Combine, Dispatch, GroupedLinear
from mmplan.cost_models.gemm import STREAM_FRACTION, alignment, gemm_s
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.cost_models.ops import (
    Activation,
    Attention,
    Conv1d,
    CrossEntropy,
    Embedding,
    Linear,
    Multiply,
    Op,
    op_inputs,
    op_routed,
    op_trainable,
)
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.traffic import backward_bytes, forward_bytes
from mmplan.cost_models.values import split
from mmplan.errors import CostModelError
from mmplan.scenario.cluster import Device, Link
from mmplan.scenario.scenario import DTYPE_BYTES, Dtype, Optimizer, Scenario
from mmplan.scenario.stacks import StackParameters, stack_parameters
from mmplan.scenario.technique import Technique

PARTS = ("gemm", "attention", "pointwise", "vocabulary", "tp", "cp", "ep", "host")
PHASES = ("forward", "dgrad", "wgrad", "recompute")
_PART = {name: index for index, name in enumerate(PARTS)}
_FORWARD, _DGRAD, _WGRAD, _RECOMPUTE = range(4)

Seconds = np.ndarray[tuple[int, int], np.dtype[np.float64]]  # [phase, part]

# Bytes per logit: `plain` casts to fp32 (6), takes log-softmax (8) and its gradient (8) and casts back (6), minus what
# fusion of neighbours saves (4); `fused` and `chunked` read logits twice and write the gradient once (arXiv 2410.10989,
# section 3.2), `chunked` computes logits twice (head product again).
_LOGIT_BYTES = {"plain": (12, 12), "fused": (4, 2), "chunked": (4, 2)}
# A cast to FP8 reads 16 bit, writes 8 bit and a transposed copy (TransformerEngine cast_transpose); a scale from the
# tensor itself needs a pass for its maximum before.
_FP8_CAST_BYTES = {"tensor": 4, "block": 6, "mx": 6}
_RING_MERGE_BYTES = 10  # per step and element of the output: fp32 sum read and written, 16-bit part read
_BACKWARD_HOST = 1.6  # kernels of a backward per forward operator, fit to single-node runs of small models on A100


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What turns operators into seconds, apart from the layer and its load."""

    device: Device
    node_link: Link
    network_link: Link
    devices_per_node: int
    precision: Dtype
    technique: Technique
    stack: StackParameters

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.precision]

    @property
    def peak_flops_per_s(self) -> float:
        peak = self.device.flops_per_s(self.precision)
        if peak is None:
            raise CostModelError(
                f"{self.device.name} has no {self.precision} matrix units; set precision to fp16 or fp32"
            )
        return peak

    @property
    def rate_flops_per_s(self) -> float:
        """Of large products in the scenario's precision."""
        return self.peak_flops_per_s * self.device.gemm_fraction * self.stack.gemm_rate

    @property
    def block_rate(self) -> tuple[float, float]:
        """(FLOP/s, bytes per operand element) of products inside blocks: FP8 where the technique says so."""
        if self.technique.fp8 == "none":
            return self.rate_flops_per_s, float(self.element_bytes)
        if self.device.fp8_flops_per_s is None or self.device.fp8_gemm_fraction is None:
            raise CostModelError(f"{self.device.name} has no FP8 units, technique.fp8 is '{self.technique.fp8}'")
        return self.device.fp8_flops_per_s * self.device.fp8_gemm_fraction * self.stack.gemm_rate, 1.0

    @property
    def pointwise_bytes_per_s(self) -> float:
        return self.device.memory_bytes_per_s * self.device.memory_fraction / self.stack.pointwise_passes

    @property
    def gradient_bytes(self) -> int:
        return DTYPE_BYTES[self.technique.gradient_dtype or "fp32"]


def scenario_rules(scenario: Scenario) -> Rules:
    """The rules of a scenario's first pool.

    Raises:
        CostModelError: the cluster mixes device types, or its devices have no units for the precision.
    """
    pools = scenario.cluster.pools
    names = sorted({pool.device.name for pool in pools})
    if len(names) > 1:
        raise CostModelError(f"the cluster mixes {' and '.join(names)}; costs are known for one device type only")
    technique = scenario.technique
    dtype = technique.gradient_dtype or scenario.optimizer.gradient_dtype
    rules = Rules(
        device=pools[0].device,
        node_link=pools[0].node_link,
        network_link=scenario.cluster.network_link,
        devices_per_node=pools[0].devices_per_node,
        precision=scenario.precision,
        technique=replace(technique, gradient_dtype=dtype),
        stack=stack_parameters(technique.stack),
    )
    if rules.peak_flops_per_s and technique.fp8 != "none":
        assert rules.block_rate  # raises where the device has no FP8
    return rules


def layer_seconds(rules: Rules, layer: Layer, load: Load, shard: Shard) -> Seconds:
    """Seconds [phase, part] of a layer for one microbatch on one rank; communication is the exposed part."""
    seconds = np.zeros((len(PHASES), len(PARTS)))
    launches = 0
    for op in _fused(layer, rules):
        if op.y.rows.of(load) == 0:
            continue
        launches += 1
        before = seconds.copy() if layer.imbalance > 1 and op_routed(op) else None
        match op:
            case Linear() | GroupedLinear() | Conv1d():
                _add_product(seconds, rules, layer, op, load, shard)
            case Attention():
                _add_attention(seconds, rules, layer, op, load, shard)
            case _:
                _add_pointwise(seconds, rules, layer, op, load, shard)
        if before is not None:  # the step waits for the rank with the most rows
            seconds += (layer.imbalance - 1) * (seconds - before)
    _add_tp(seconds, rules, layer, load, shard)
    _add_ep(seconds, rules, layer, load, shard)
    _add_recompute(seconds, rules, layer)
    _add_host(seconds, rules, launches)
    return seconds


def optimizer_seconds(rules: Rules, optimizer: Optimizer, parameters: float) -> float:
    """Seconds of an update of so many parameters on one rank: gradient read and cleared, moments and master weights
    read and written, the 16-bit weight written; streaming kernels (Apex FusedAdam, torch fused AdamW)."""
    if parameters == 0:
        return 0.0
    moments = 2 * FP32_BYTES if optimizer.name == "adamw" else 0
    has_master = optimizer.name == "adamw" and rules.element_bytes < FP32_BYTES
    weights = 2 * FP32_BYTES + rules.element_bytes if has_master else 2 * rules.element_bytes
    traffic = 2 * rules.gradient_bytes + 2 * moments + weights
    stream = rules.device.memory_bytes_per_s * STREAM_FRACTION
    return max(traffic * parameters / stream, rules.device.launch_s)


def _fused(layer: Layer, rules: Rules) -> Iterator[Op]:
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
            width, unit = op.y.width, op.y.unit
            while position < len(ops):
                other = ops[position]
                same = isinstance(other, Linear) and other.x.name == op.x.name and other.trainable == op.trainable
                if not same or not isinstance(other, Linear) or other.parallel != "column":
                    break
                width += other.y.width
                unit = min(unit, other.y.unit)
                position += 1
            yield replace(op, y=replace(op.y, width=width, unit=unit))
        elif isinstance(op, Activation) and position < len(ops) and isinstance(ops[position], Multiply):
            gate = ops[position]
            position += 1
            assert isinstance(gate, Multiply)
            yield replace(gate, a=op.x)  # reads gate and up, writes the product
        else:
            yield op


def _is_vocabulary(layer: Layer) -> bool:
    return layer.kind in ("head", "loss")


def _has_dgrad(layer: Layer, op: Op) -> bool:
    return any(value.name in layer.grad_values for value in op_inputs(op))


def _add_product(
    seconds: Seconds, rules: Rules, layer: Layer, op: Linear | GroupedLinear | Conv1d, load: Load, shard: Shard
) -> None:
    rows, inner, outer = op.x.local_rows(load, shard), op.x.local_width(shard), op.y.local_width(shard)
    groups = 1
    if isinstance(op, GroupedLinear):
        groups = split(op.experts, 1, shard.ep)
        rows /= groups
    elif isinstance(op, Conv1d):
        rows, inner = op.y.local_rows(load, shard), op.kernel * op.x.width
    vocabulary = _is_vocabulary(layer)
    part = _PART["vocabulary" if vocabulary else "gemm"]
    in_blocks = layer.kind in ("block", "cross_block")
    rate, size = rules.block_rate if in_blocks else (rules.rate_flops_per_s, float(rules.element_bytes))
    device, has_dgrad, trained = rules.device, _has_dgrad(layer, op), op_trainable(op)
    rate *= alignment(device, inner * size, outer * size)
    seconds[_FORWARD, part] += gemm_s(rows, outer, inner, device, rate, size, groups)
    if has_dgrad:
        seconds[_DGRAD, part] += gemm_s(rows, inner, outer, device, rate, size, groups)
    if trained:
        seconds[_WGRAD, part] += gemm_s(inner, outer, rows, device, rate, size, groups)
        moved = rules.stack.accumulation_bytes * op_parameters(op, shard) * rules.gradient_bytes / 4
        seconds[_WGRAD, _PART["pointwise"]] += moved / rules.pointwise_bytes_per_s
    if in_blocks and rules.technique.fp8 != "none":
        cast = _FP8_CAST_BYTES[rules.technique.fp8] * rows * groups / rules.pointwise_bytes_per_s
        seconds[_FORWARD, _PART["pointwise"]] += cast * inner
        if has_dgrad or trained:
            seconds[_DGRAD, _PART["pointwise"]] += cast * outer


def _add_attention(seconds: Seconds, rules: Rules, layer: Layer, op: Attention, load: Load, shard: Shard) -> None:
    part, device, technique = _PART["attention"], rules.device, rules.technique
    flops = product_flops(op, load, shard)
    has_dgrad = _has_dgrad(layer, op)
    heads = op.q.local_width(shard) // op.head_dim
    tokens = op.q.local_rows(load, shard)
    pairs = flops / (2 * heads * op.product_width)
    if technique.attention == "math":
        length = pairs / tokens if tokens else 0.0
        batch = heads * (tokens / length if length else 0.0)
        products = math_attention_s(length, length, op.head_dim, batch, device, rules.rate_flops_per_s)
        forward = score_bytes(pairs * heads, technique.dropout, backward=False) / rules.pointwise_bytes_per_s
        backward = score_bytes(pairs * heads, technique.dropout, backward=True) / rules.pointwise_bytes_per_s
        seconds[_FORWARD, part] += products + forward
        if has_dgrad:
            seconds[_DGRAD, part] += 2 * products + backward
    else:
        once = fused_attention_s(
            flops, pairs, tokens, op.head_dim, op.causal, device, technique.attention, rules.peak_flops_per_s
        )
        seconds[_FORWARD, part] += once
        if has_dgrad:
            again = (2 * op.product_width + op.head_dim) / op.product_width  # five products for the forward two's
            seconds[_DGRAD, part] += again * once / BACKWARD_RATE
    if shard.cp > 1:
        _add_cp(seconds, rules, op, load, shard)


def _add_cp(seconds: Seconds, rules: Rules, op: Attention, load: Load, shard: Shard) -> None:
    """Ring attention (arXiv 2310.01889): keys and values travel cp - 1 hops beside the attention of what is here, in
    the backward pass with their gradients; each step adds its part to the output and to the query gradient in fp32
    (TransformerEngine, attn_forward_func_with_cp)."""
    part = _PART["cp"]
    link = rules.node_link if shard.tp * shard.cp <= rules.devices_per_node else rules.network_link
    hop = message_s((op.k.elements(load, shard) + op.v.elements(load, shard)) * rules.element_bytes, link)
    for phase, volume in ((_FORWARD, 1), (_DGRAD, 2)):
        beside = seconds[phase, _PART["attention"]]
        if beside > 0:
            ring = volume * hop * (shard.cp - 1)
            merged = _RING_MERGE_BYTES * shard.cp * op.y.elements(load, shard) / rules.pointwise_bytes_per_s
            seconds[phase, part] += merged
            seconds[phase, part] += max(0.0, ring - beside) + rules.stack.exposed_cp * min(ring, beside)


def _add_pointwise(seconds: Seconds, rules: Rules, layer: Layer, op: Op, load: Load, shard: Shard) -> None:
    part = _PART["vocabulary" if _is_vocabulary(layer) else "pointwise"]
    size, rate, floor = rules.element_bytes, rules.pointwise_bytes_per_s, rules.device.launch_s
    if isinstance(op, CrossEntropy):
        forward, backward = _LOGIT_BYTES[rules.technique.cross_entropy]
        logits = op.x.elements(load, shard)
        seconds[_FORWARD, part] += max(forward * logits / rate, floor)
        if _has_dgrad(layer, op):
            seconds[_DGRAD, part] += max(backward * logits / rate, floor)
        return
    whole = not op.y.sharded and not op.y.routed
    share = shard.tp if whole and rules.technique.sequence_parallel else 1
    passes = 1
    if isinstance(op, Dispatch | Combine) and shard.ep > 1:
        passes = 2  # sorted by rank before the exchange, by expert after it (Megatron Core, MoEAlltoAllTokenDispatcher)
    moved = passes * forward_bytes(op, load, size, shard) / share
    if moved:
        seconds[_FORWARD, part] += max(moved / rate, floor)
    if _has_dgrad(layer, op):
        moved = passes * backward_bytes(op, load, size, shard) / share
        if moved:
            seconds[_DGRAD, part] += max(moved / rate, floor)
    if isinstance(op, Embedding) and op.trainable:
        rows = op.y.elements(load, shard) * (2 * rules.gradient_bytes + size)
        seconds[_WGRAD, part] += max(rows / rate, floor)


def reduced_forward_elements(layer: Layer, load: Load, shard: Shard) -> tuple[float, ...]:
    """Elements of each all-reduce of a layer's forward: outputs of row-parallel linears and of the split table, and the
    sum over experts that are split the same way (with expert parallelism `_add_ep` has it)."""
    whole_experts = shard.ep > 1 or shard.expert_tp == 1
    reduced = [
        op.y
        for op in layer.ops
        if isinstance(op, Embedding)
        or (isinstance(op, Linear) and op.parallel == "row")
        or (isinstance(op, Combine) and not whole_experts)
    ]
    return tuple(value.elements(load, shard) for value in reduced)


def reduced_backward_elements(layer: Layer, load: Load, shard: Shard) -> tuple[float, ...]:
    """Elements of each all-reduce of a layer's backward: one per distinct input of column-parallel linears, and of
    experts that are split the same way."""
    whole_experts = shard.ep > 1 or shard.expert_tp == 1
    columns = [
        op.x
        for op in layer.ops
        if (isinstance(op, Linear) and op.parallel == "column") or (isinstance(op, Dispatch) and not whole_experts)
    ]
    distinct = {value.name: value for value in columns if value.name in layer.grad_values}
    return tuple(value.elements(load, shard) for value in distinct.values())


def _add_tp(seconds: Seconds, rules: Rules, layer: Layer, load: Load, shard: Shard) -> None:
    """With sequence parallel each all-reduce becomes a gather and a reduce-scatter of the same volume, and the backward
    gathers the input of column-parallel linears once more (arXiv 2205.05198, section 4.2.2)."""
    if shard.tp == 1:
        return
    part, size, stack = _PART["tp"], rules.element_bytes, rules.stack
    group = Group(shard.tp, min(shard.tp, rules.devices_per_node))
    links = rules.node_link, rules.network_link
    forward = sum(all_reduce_s(n * size, group, *links) for n in reduced_forward_elements(layer, load, shard))
    seconds[_FORWARD, part] += stack.exposed_tp_forward * forward
    for elements in reduced_backward_elements(layer, load, shard):
        again = 1.5 if rules.technique.sequence_parallel else 1.0
        once = all_reduce_s(elements * size, group, *links)
        seconds[_DGRAD, part] += stack.exposed_tp_backward * again * once


def _add_ep(seconds: Seconds, rules: Rules, layer: Layer, load: Load, shard: Shard) -> None:
    """All-to-all of routed rows before and after the experts, forward and backward (arXiv 2006.16668); with expert
    tensor parallelism the rows are gathered over its ranks as well."""
    if shard.ep == 1:
        return
    group = Group(shard.ep, max(1, min(shard.ep, rules.devices_per_node // shard.expert_tp)))
    for op in layer.ops:
        if not isinstance(op, Dispatch | Combine):
            continue
        value = op.y if isinstance(op, Dispatch) else op.x
        sent = value.elements(load, shard) * rules.element_bytes / shard.expert_tp
        once = all_to_all_s(sent, group, rules.node_link, rules.network_link)
        if shard.expert_tp > 1:
            inner = Group(shard.expert_tp, min(shard.expert_tp, rules.devices_per_node))
            once += gather_s(sent * shard.expert_tp, inner, rules.node_link, rules.network_link)
        seconds[_FORWARD, _PART["ep"]] += once
        if _has_dgrad(layer, op):
            seconds[_DGRAD, _PART["ep"]] += once


def _add_recompute(seconds: Seconds, rules: Rules, layer: Layer) -> None:
    """What a layer's backward computes again; of `full` with a layer count, `estimate.py` takes the share."""
    if layer.kind not in ("block", "cross_block") or seconds[_DGRAD].sum() + seconds[_WGRAD].sum() == 0:
        return
    if rules.technique.recompute == "full":
        seconds[_RECOMPUTE] = seconds[_FORWARD]
    elif rules.technique.recompute == "selective":
        seconds[_RECOMPUTE] = seconds[_FORWARD] * rules.stack.selective_share
        seconds[_RECOMPUTE, _PART["attention"]] = seconds[_FORWARD, _PART["attention"]]
        seconds[_RECOMPUTE, _PART["tp"]] = 0.0


def _add_host(seconds: Seconds, rules: Rules, launches: int) -> None:
    """Where the host needs longer to launch a layer than the device to run it, the device waits."""
    host_s = launches * rules.stack.host_op_s
    if host_s == 0:
        return
    column = _PART["host"]
    seconds[_FORWARD, column] = max(0.0, host_s - seconds[_FORWARD].sum())
    if seconds[_RECOMPUTE].sum() > 0:
        seconds[_RECOMPUTE, column] = max(0.0, host_s - seconds[_RECOMPUTE].sum())
    backward = seconds[_DGRAD].sum() + seconds[_WGRAD].sum()
    if backward > 0:
        seconds[_DGRAD, column] = max(0.0, _BACKWARD_HOST * host_s - backward)
