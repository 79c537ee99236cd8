"""What turns operators into seconds (device, links, technique, stack), and the phases and parts of the result."""

from dataclasses import dataclass, replace

import numpy as np

from mmplan.errors import CostModelError
from mmplan.scenario.cluster import Device, Link, Pool
from mmplan.scenario.scenario import DTYPE_BYTES, Dtype, Scenario
from mmplan.scenario.stacks import StackParameters, stack_parameters
from mmplan.scenario.technique import Technique

PARTS = ("gemm", "attention", "pointwise", "vocabulary", "tp", "cp", "ep", "host")
PHASES = ("forward", "dgrad", "wgrad", "recompute")
PART = {name: index for index, name in enumerate(PARTS)}
FORWARD, DGRAD, WGRAD, RECOMPUTE = range(4)

Seconds = np.ndarray[tuple[int, int], np.dtype[np.float64]]  # [phase, part]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What turns operators into seconds, apart from the layer and its load. Where modules differ in precision it is the
    narrowest of theirs; layers are priced in their own."""

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
            others: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
            there = [other for other in others if self.device.flops_per_s(other) is not None]
            raise CostModelError(
                f"{self.device.name} has no {self.precision} matrix units; set precision to {' or '.join(there)}"
            )
        return peak

    @property
    def rate_flops_per_s(self) -> float:
        """Of large products in this precision."""
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
    """The rules of a scenario's only type of device.

    Raises:
        CostModelError: the cluster mixes device types, or its devices have no units for the precision.
    """
    names = sorted({pool.device.name for pool in scenario.cluster.pools})
    if len(names) > 1:
        raise CostModelError(f"the cluster mixes {' and '.join(names)}; this needs one type of device")
    return pool_rules(scenario)[0]


def pool_rules(scenario: Scenario) -> tuple[Rules, ...]:
    """The rules of each pool.

    Raises:
        CostModelError: a device has no units for the precision.
    """
    return tuple(_rules_of(scenario, pool) for pool in scenario.cluster.pools)


def _rules_of(scenario: Scenario, pool: Pool) -> Rules:
    technique = scenario.technique
    dtype = technique.gradient_dtype or scenario.optimizer.gradient_dtype
    narrowest = min(scenario.precisions, key=DTYPE_BYTES.__getitem__)
    rules = Rules(
        device=pool.device,
        node_link=pool.node_link,
        network_link=scenario.cluster.network_link,
        devices_per_node=pool.devices_per_node,
        precision=narrowest,
        technique=replace(technique, gradient_dtype=dtype),
        stack=stack_parameters(technique.stack),
    )
    if rules.peak_flops_per_s and technique.fp8 != "none":
        assert rules.block_rate  # raises where the device has no FP8
    return rules
