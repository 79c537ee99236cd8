"""Seconds from data-sheet peaks and the fractions of them that large operators reach; nothing is measured here.

Each operator takes max(matrix FLOPs / rate, minimal bytes / rate, launch time). Tensor parallelism is Megatron's
(arXiv 1909.08053): its all-reduces are exposed, after row-parallel linears forward and at the inputs of
column-parallel ones backward.
"""

import math

from mmplan.cost_models.counts import FP32_BYTES, op_dgrad_flops, op_parameters, op_wgrad_flops, product_flops
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.cost_models.ops import Attention, Embedding, Linear, Op, op_inputs, op_trainable
from mmplan.cost_models.traffic import backward_bytes, forward_bytes
from mmplan.errors import CostModelError
from mmplan.scenario.cluster import Link
from mmplan.scenario.scenario import DTYPE_BYTES, Scenario


class AnalyticCostModel:
    """`CostModel` of a scenario's cluster, precision and optimizer.

    Raises:
        CostModelError: the cluster mixes device types, or its devices have no units for the precision.
    """

    def __init__(self, scenario: Scenario) -> None:
        pools, precision = scenario.cluster.pools, scenario.precision
        names = sorted({pool.device.name for pool in pools})
        if len(names) > 1:
            raise CostModelError(f"the cluster mixes {' and '.join(names)}; costs are known for one device type only")
        self._device, self._node_link = pools[0].device, pools[0].node_link
        self._network_link, self._optimizer = scenario.cluster.network_link, scenario.optimizer
        peak = self._device.flops_per_s(precision)
        if peak is None:
            raise CostModelError(f"{self._device.name} has no {precision} matrix units; set precision to fp16 or fp32")
        self._peak_flops_per_s, self._dtype_bytes = peak, DTYPE_BYTES[precision]
        self._bytes_per_s = self._device.memory_bytes_per_s * self._device.memory_fraction

    def forward_s(self, layer: Layer, load: Load, tp: int) -> float:
        seconds = 0.0
        for op in layer.ops:
            flops = product_flops(op, load, tp)
            seconds += self._op_s(op, flops, forward_bytes(op, load, self._dtype_bytes, tp))
        return seconds + self._tp_all_reduces_s(forward_all_reduce_elements(layer, load), tp)

    def dgrad_s(self, layer: Layer, load: Load, tp: int) -> float:
        seconds = 0.0
        for op in layer.ops:
            if any(value.name in layer.grad_values for value in op_inputs(op)):
                flops = op_dgrad_flops(layer, op, load, tp)
                seconds += self._op_s(op, flops, backward_bytes(op, load, self._dtype_bytes, tp))
        return seconds + self._tp_all_reduces_s(backward_all_reduce_elements(layer, load), tp)

    def wgrad_s(self, layer: Layer, load: Load, tp: int) -> float:
        """Matrix products, and each gradient added to its accumulator (read and write in `gradient_dtype`)."""
        gradient_bytes = DTYPE_BYTES[self._optimizer.gradient_dtype]
        seconds = 0.0
        for op in layer.ops:
            if op_trainable(op) and op.y.rows.of(load) > 0:
                seconds += self._op_s(op, op_wgrad_flops(op, load, tp), 0.0)
                seconds += 2 * gradient_bytes * op_parameters(op, tp) / self._bytes_per_s
        return seconds

    def backward_s(self, layer: Layer, load: Load, tp: int) -> float:
        return self.dgrad_s(layer, load, tp) + self.wgrad_s(layer, load, tp)

    def transfer_s(self, bytes_sent: float, same_node: bool) -> float:
        """latency + bytes / bandwidth (the alpha-beta model, Thakur et al. 2005, section 3)."""
        return _message_s(bytes_sent, self._node_link if same_node else self._network_link)

    def all_reduce_s(self, bytes_reduced: float, ranks: int, ranks_per_node: int) -> float:
        """Reduce-scatter in the node, all-reduce of the shares across nodes (each rank over its own part of the
        network), all-gather in the node. Each level: 2 log2(p) latencies and 2 (p - 1) / p of its bytes (Thakur,
        Rabenseifner, Gropp, IJHPCA 2005, section 4.5).
        """
        if ranks == 1 or bytes_reduced == 0:
            return 0.0
        inside = min(ranks, ranks_per_node)
        nodes = math.ceil(ranks / inside)
        return _level_s(bytes_reduced, inside, self._node_link) + _level_s(
            bytes_reduced / inside, nodes, self._network_link
        )

    def optimizer_s(self, trainable_parameters_on_rank: int) -> float:
        """Update by memory traffic: gradient read and cleared, state and weights read and written."""
        optimizer = self._optimizer
        moments = 2 * FP32_BYTES if optimizer.name == "adamw" else 0
        has_master = optimizer.name == "adamw" and self._dtype_bytes < FP32_BYTES
        weights = 2 * FP32_BYTES + self._dtype_bytes if has_master else 2 * self._dtype_bytes
        traffic = 2 * DTYPE_BYTES[optimizer.gradient_dtype] + 2 * moments + weights
        if trainable_parameters_on_rank == 0:
            return 0.0
        return max(traffic * trainable_parameters_on_rank / self._bytes_per_s, self._device.launch_s)

    def _op_s(self, op: Op, flops: float, moved_bytes: float) -> float:
        """Seconds of one operator; nothing is launched for empty tensors."""
        if flops == 0 and moved_bytes == 0:
            return 0.0
        fraction = self._device.gemm_fraction
        if isinstance(op, Attention):
            flops = flops / 2 if op.causal else flops  # kernels skip the masked half
            fraction = self._device.attention_fraction
        compute_s = flops / (self._peak_flops_per_s * fraction)
        return max(compute_s, moved_bytes / self._bytes_per_s, self._device.launch_s)

    def _tp_all_reduces_s(self, elements: tuple[float, ...], tp: int) -> float:
        if tp == 1:
            return 0.0
        return sum(self.all_reduce_s(count * self._dtype_bytes, tp, tp) for count in elements)


def forward_all_reduce_elements(layer: Layer, load: Load) -> tuple[float, ...]:
    """Elements of each all-reduce of a layer's forward: outputs of row-parallel linears and of the split table."""
    reduced = [
        op.y for op in layer.ops if isinstance(op, Embedding) or (isinstance(op, Linear) and op.parallel == "row")
    ]
    return tuple(value.elements(load) for value in reduced)


def backward_all_reduce_elements(layer: Layer, load: Load) -> tuple[float, ...]:
    """Elements of each all-reduce of a layer's backward: one per distinct input of column-parallel linears."""
    columns = [op.x for op in layer.ops if isinstance(op, Linear) and op.parallel == "column"]
    distinct = {value.name: value for value in columns if value.name in layer.grad_values}
    return tuple(value.elements(load) for value in distinct.values())


def _message_s(bytes_sent: float, link: Link) -> float:
    return link.latency_s + bytes_sent / (link.bytes_per_s * link.fraction) if bytes_sent > 0 else 0.0


def _level_s(bytes_reduced: float, ranks: int, link: Link) -> float:
    steps, share = 2 * math.ceil(math.log2(ranks)), 2 * (ranks - 1) / ranks
    return steps * link.latency_s + share * bytes_reduced / (link.bytes_per_s * link.fraction)
