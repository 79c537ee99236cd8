"""Seconds of states, weights or activations that lie in host memory (ZeRO-Offload, arXiv 2101.06840, sections 4 and 5).

At the end of a step each rank copies the gradients of its share to the host, whose cores update master weights and
moments there, and weights return while the next ones are updated: copy out, then the longer of update and copy back.
That gradients leave during the backward is not assumed: a plan sums them after the last one.
"""

from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.cost_models.memory_activations import BLOCKS, Setting, kept, kept_recomputed
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.time_rules import Rules

# CPU-Adam on both sockets of a host (two Xeon Platinum 8168): 2.57 s for 10 billion parameters, 0.22 s for one billion
# (arXiv 2101.06840, table 4). The ranks of a node share the host.
CPU_ADAM_S = 2.57 / 10e9


def offloaded_seconds(rules: Rules, parameters: float, host_bytes_per_s: float) -> float:
    """Of the update of so many parameters on each rank of a node, copied at that rate in one direction; where weights
    lie on the host too they are copied microbatch by microbatch (`copied_seconds`)."""
    update_s = parameters * rules.devices_per_node * CPU_ADAM_S
    if rules.technique.host_states == "parameters":
        return update_s
    out_s, back_s = (size * parameters / host_bytes_per_s for size in (rules.gradient_bytes, rules.element_bytes))
    return out_s + max(update_s, back_s)


def copied_seconds(rules: Rules, weights: float, gradients: float) -> tuple[float, float]:
    """(of weights to the device, of gradients from it) for so many parameters of a rank's own share, where these lie in
    host memory: every rank has its own link, so each brings its share before ranks gather (ZeRO-Infinity, arXiv
    2104.07857, section 6.1), once forward and once backward; gradients leave with every backward."""
    rate = rules.device.host_bytes_per_s
    if rules.technique.host_states != "parameters" or rate is None:
        return 0.0, 0.0
    return weights * rules.element_bytes / rate, gradients * rules.gradient_bytes / rate


def copied_activations_s(rules: Rules, layer: Layer, load: Load, shard: Shard) -> float:
    """Of what a block keeps of a microbatch, where that waits in host memory: out once it has run, and back once before
    its backward, each beside the work of one block (vDNN, arXiv 1602.08124, section 3)."""
    rate, technique = rules.device.host_bytes_per_s, rules.technique
    if not technique.host_activations or layer.kind not in BLOCKS or rate is None:
        return 0.0
    setting = Setting(precision=rules.precision, technique=technique, shard=shard)
    return (kept_recomputed if technique.recompute == "full" else kept)(layer, load, setting).total / rate
