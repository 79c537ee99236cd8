"""The stage-cut problem of one configuration as plain integers, and the value of one answer.

Groups of layers form a DAG and are numbered in topological order. Partition them into exactly `stages` non-empty stages
whose quotient is acyclic, within memory, so that the closed-form step time is least:

    tail_s   = T_s + max over cut edges from s to r of (lag + tail_r)       T_s: work of stage s per microbatch
    depth_s  = 1 + max over the stages r that follow s of depth_r
    memory_s = sum of state + in_flight_s * sum of kept, in_flight_s = min(m, depth_s) for 1F1B and m for GPipe
    J        = (m - 1) * max_s T_s + max_s tail_s + max_s finish_s
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.planner.schedules.in_flight import IntArray, in_flight, in_flight_counts
from mmplan.scenario.schedule_names import ScheduleName


@dataclass(frozen=True, kw_only=True, slots=True)
class CutEdge:
    """A tensor from group `producer` to group `consumer`; `lag_ns` is paid when they lie in different stages."""

    producer: int
    consumer: int
    lag_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CutProblem:
    """One configuration in whole nanoseconds and bytes; every tuple has one entry per group.

    `finish_ns` is the group's part of gradient all-reduce and optimizer; a stage with at least one `trainable` group
    pays `finish_fixed_ns` once on top. `capacity_bytes` is what states and activations of a stage may take.
    """

    work_ns: tuple[int, ...]
    state_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    finish_ns: tuple[int, ...]
    trainable: tuple[bool, ...]
    edges: tuple[CutEdge, ...]
    finish_fixed_ns: int
    capacity_bytes: int
    stages: int
    microbatches: int
    schedule: ScheduleName

    def __post_init__(self) -> None:
        if any(edge.producer >= edge.consumer for edge in self.edges):
            raise ValueError("groups are not numbered in topological order")
        if self.stages < 1 or self.microbatches < 1:
            raise ValueError(f"{self.stages} stages, {self.microbatches} microbatches: both must be positive")

    @property
    def groups(self) -> int:
        return len(self.work_ns)

    def in_flight(self, depths: IntArray) -> IntArray:
        """Microbatches that stages at these depths hold at once."""
        return in_flight_counts(self.schedule, self.microbatches, depths)

    @property
    def least_in_flight(self) -> int:
        """Of a stage at the end of the pipeline."""
        return in_flight(self.schedule, self.microbatches, 1)

    @property
    def most_in_flight(self) -> int:
        """Of the first of all stages in a row."""
        return in_flight(self.schedule, self.microbatches, self.stages)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutValue:
    """What one answer is worth; `stage_memory_bytes` has one entry per stage, stages numbered in topological order."""

    objective_ns: int
    stage_memory_bytes: tuple[int, ...]


def evaluate_cut(problem: CutProblem, stage_of: Sequence[int]) -> CutValue:
    """The value of putting group g on stage `stage_of[g]`; memory is reported, not judged.

    Raises:
        ValueError: an edge leads to a lower stage, or a stage is empty.
    """
    stages = range(problem.stages)
    if set(stage_of) != set(stages):
        raise ValueError(f"stages used {sorted(set(stage_of))}, expected 0 to {problem.stages - 1}")
    if any(stage_of[edge.producer] > stage_of[edge.consumer] for edge in problem.edges):
        raise ValueError("an edge leads back to an earlier stage")
    work_ns, state_bytes, kept_bytes, finish_ns = ([0] * problem.stages for _ in range(4))
    for group, stage in enumerate(stage_of):
        work_ns[stage] += problem.work_ns[group]
        state_bytes[stage] += problem.state_bytes[group]
        kept_bytes[stage] += problem.kept_bytes[group]
        finish_ns[stage] += problem.finish_ns[group]
    for stage in {stage for group, stage in enumerate(stage_of) if problem.trainable[group]}:
        finish_ns[stage] += problem.finish_fixed_ns
    tail_ns, depth = list(work_ns), [1] * problem.stages
    for edge in sorted(problem.edges, key=lambda edge: -stage_of[edge.producer]):
        sender, receiver = stage_of[edge.producer], stage_of[edge.consumer]
        if sender != receiver:
            tail_ns[sender] = max(tail_ns[sender], work_ns[sender] + edge.lag_ns + tail_ns[receiver])
            depth[sender] = max(depth[sender], 1 + depth[receiver])
    alive = [in_flight(problem.schedule, problem.microbatches, depth[s]) for s in stages]
    return CutValue(
        objective_ns=(problem.microbatches - 1) * max(work_ns) + max(tail_ns) + max(finish_ns),
        stage_memory_bytes=tuple(state_bytes[s] + alive[s] * kept_bytes[s] for s in stages),
    )
