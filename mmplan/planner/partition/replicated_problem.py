"""Pipelines of replicated stages: a chain of sets of layers, each with its tensor and data degree and recomputation.

The model of Tarnawski et al., "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021: the seconds per
sample of the slowest stage, without fill and drain. A stage of layers S, tensor degree t and data degree d takes
    (times of the layers + transfers over edges that leave or enter S) / d + 4 parameters (d - 1) / (d link samples),
where d divides the samples of a batch, and holds on each device the sum of A y + B of its layers: y = ceil(s / d)
microbatches are in flight, s being the sum of the data degrees of this and all later stages.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOption:
    """One way to run a layer, with or without recomputation: seconds per sample, bytes per microbatch in flight and
    bytes in any case, on each device of the tensor group.
    """

    name: str
    time_s: float
    in_flight_bytes: float
    fixed_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAtDegree:
    """A layer at one tensor degree. `transfer_s[n]`: seconds per sample when neighbour n is in another stage, 0 if n is
    absent.
    """

    options: tuple[LayerOption, ...]
    parameter_bytes: float
    transfer_s: dict[int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatedProblem:
    """`layers[v][t]`: layer v at tensor degree t; layers are numbered in a topological order of `edges`."""

    layers: tuple[dict[int, LayerAtDegree], ...]
    edges: tuple[tuple[int, int], ...]
    devices: int
    capacity_bytes: float
    link_bytes_per_s: float
    samples: int

    def __post_init__(self) -> None:
        if not self.layers or self.devices < 1 or self.samples < 1 or self.link_bytes_per_s <= 0:
            raise ValueError(f"{len(self.layers)} layers, {self.devices} devices, {self.samples} samples")
        if any(not 0 <= producer < consumer < len(self.layers) for producer, consumer in self.edges):
            raise ValueError("an edge leads out of the layers or to an earlier layer")

    @property
    def data_degrees(self) -> tuple[int, ...]:
        """Those a stage may have, ascending."""
        return tuple(d for d in range(1, self.devices + 1) if self.samples % d == 0)

    def resync_s(self, parameter_bytes: float) -> float:
        """Seconds per sample that the averaging of gradients tends to as the data degree grows."""
        return 4 * parameter_bytes / self.link_bytes_per_s / self.samples


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatedStage:
    """`options[i]`: index of the option that layer `layers[i]` runs with."""

    layers: tuple[int, ...]
    options: tuple[int, ...]
    tensor_degree: int
    data_degree: int


def seconds_per_sample(problem: ReplicatedProblem, stages: tuple[ReplicatedStage, ...]) -> float:
    """The objective: the slowest stage.

    Raises:
        ValueError: a layer is missing or repeated, an edge leads back, a data degree does not divide the samples, or
            devices or memory do not suffice.
    """
    if any(problem.samples % stage.data_degree for stage in stages):
        raise ValueError(f"a data degree does not divide {problem.samples} samples")
    stage_of = {layer: index for index, stage in enumerate(stages) for layer in stage.layers}
    if sorted(layer for stage in stages for layer in stage.layers) != list(range(len(problem.layers))):
        raise ValueError("the stages do not hold each layer once")
    if any(stage_of[producer] > stage_of[consumer] for producer, consumer in problem.edges):
        raise ValueError("an edge leads back to an earlier stage")
    used = sum(stage.tensor_degree * stage.data_degree for stage in stages)
    if used > problem.devices:
        raise ValueError(f"the stages use {used} devices of {problem.devices}")
    times_s = []
    for index, stage in enumerate(stages):
        d = stage.data_degree
        at_degree = {layer: problem.layers[layer][stage.tensor_degree] for layer in stage.layers}
        run = [at_degree[layer].options[option] for layer, option in zip(stage.layers, stage.options, strict=True)]
        in_flight = math.ceil(sum(later.data_degree for later in stages[index:]) / d)
        held_bytes = math.fsum(option.in_flight_bytes * in_flight + option.fixed_bytes for option in run)
        if held_bytes > problem.capacity_bytes:
            raise ValueError(f"stage {index} holds {held_bytes:.0f} bytes of {problem.capacity_bytes:.0f}")
        work_s = [option.time_s for option in run]
        for producer, consumer in problem.edges:
            if (producer in at_degree) != (consumer in at_degree):
                inside, outside = (producer, consumer) if producer in at_degree else (consumer, producer)
                work_s.append(at_degree[inside].transfer_s.get(outside, 0.0))
        parameter_bytes = math.fsum(layer.parameter_bytes for layer in at_degree.values())
        times_s.append(math.fsum(work_s) / d + problem.resync_s(parameter_bytes) * (d - 1) / d)
    return max(times_s)
