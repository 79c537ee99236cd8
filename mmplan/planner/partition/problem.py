"""The device placement of a DAG of operators for throughput: who pays what, and the value of a placement.

Stages are devices in pipeline order; each is one accelerator or one CPU. The step of a stream of samples is the load
of the busiest device: compute time of its nodes and, on an accelerator, the transfer time of every output that it
shares with another device, paid once per device whatever the number of consumers. Objective and rules are those of
Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020, for contiguous
placements: every edge leads to the same or a later stage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionProblem:
    """Nodes 0 to n-1 of a DAG and the devices to put them on.

    `accelerator_s[v]`, `cpu_s[v]`: compute time of node v on either kind, infinite where it cannot run.
    `transfer_s[v]`: time to send or receive the output of v. `consumers[v]`: nodes that read it.
    `order`: pairs (u, v) with stage(u) <= stage(v). `colour[v]`: nodes of one colour share a device.
    `capacity_bytes`: of one accelerator; a CPU has no limit.
    """

    accelerator_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    size_bytes: tuple[float, ...]
    transfer_s: tuple[float, ...]
    consumers: tuple[tuple[int, ...], ...]
    order: tuple[tuple[int, int], ...]
    colour: tuple[int, ...]
    accelerators: int
    cpus: int
    capacity_bytes: float

    def __post_init__(self) -> None:
        columns = (self.cpu_s, self.size_bytes, self.transfer_s, self.consumers, self.colour)
        if any(len(column) != self.nodes for column in columns):
            raise ValueError(f"columns of {[len(column) for column in columns]} values for {self.nodes} nodes")
        if self.nodes == 0 or self.accelerators < 0 or self.cpus < 0 or self.accelerators + self.cpus == 0:
            raise ValueError(f"{self.nodes} nodes on {self.accelerators} accelerators and {self.cpus} CPUs")
        numbers = (*self.accelerator_s, *self.cpu_s, *self.size_bytes, *self.transfer_s, self.capacity_bytes)
        if any(not number >= 0 for number in numbers):
            raise ValueError("a cost or size is negative or not a number")
        if any(math.isinf(number) for number in (*self.size_bytes, *self.transfer_s, self.capacity_bytes)):
            raise ValueError("a size, a transfer time or the capacity is infinite")

    @property
    def nodes(self) -> int:
        return len(self.accelerator_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """`stage_of[v]`: stage of node v; `on_cpu[s]`: stage s is a CPU."""

    stage_of: tuple[int, ...]
    on_cpu: tuple[bool, ...]


def busiest_load_s(problem: PartitionProblem, placement: Placement) -> float:
    """The objective: seconds of the busiest device, infinite when a node cannot run where it is.

    Raises:
        ValueError: the placement breaks the order, a colour, a capacity or the number of devices.
    """
    stage_of, on_cpu = placement.stage_of, placement.on_cpu
    if sum(on_cpu) > problem.cpus or len(on_cpu) - sum(on_cpu) > problem.accelerators:
        raise ValueError(f"{sum(on_cpu)} CPUs and {len(on_cpu) - sum(on_cpu)} accelerators used")
    if any(stage_of[first] > stage_of[second] for first, second in problem.order):
        raise ValueError("an edge leads back to an earlier stage")
    if len(set(zip(problem.colour, stage_of, strict=True))) != len(set(problem.colour)):
        raise ValueError("nodes of one colour are on two devices")
    stages = range(len(on_cpu))
    compute_s: list[list[float]] = [[] for _ in stages]
    size_bytes: list[list[float]] = [[] for _ in stages]
    for node, stage in enumerate(stage_of):
        compute_s[stage].append(problem.cpu_s[node] if on_cpu[stage] else problem.accelerator_s[node])
        size_bytes[stage].append(problem.size_bytes[node])
    for stage in stages:
        if not on_cpu[stage] and math.fsum(size_bytes[stage]) > problem.capacity_bytes:
            raise ValueError(f"stage {stage} holds {math.fsum(size_bytes[stage]):.0f} bytes")
    for node, consumers in enumerate(problem.consumers):
        holders = {stage_of[member] for member in (node, *consumers)}
        for stage in holders if len(holders) > 1 else ():
            if not on_cpu[stage]:
                compute_s[stage].append(problem.transfer_s[node])
    return max(math.fsum(load) for load in compute_s)


def mirrored_order(
    edges: Sequence[tuple[int, int]], backward: Sequence[bool], colour: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """The stage order of a training DAG: forward edges as they are, edges of the backward pass turned round.

    The backward pass visits the stages last to first. Only an edge at a backward node whose colour has no forward node
    says something new; edges from the forward into the backward pass order nothing.
    """
    forward_colours = {colour[node] for node in range(len(colour)) if not backward[node]}
    orphan = [is_backward and colour[node] not in forward_colours for node, is_backward in enumerate(backward)]
    pairs = []
    for first, second in edges:
        if not backward[first] and not backward[second]:
            pairs.append((first, second))
        elif backward[first] and backward[second] and (orphan[first] or orphan[second]):
            pairs.append((second, first))
    return tuple(pairs)
