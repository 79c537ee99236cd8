"""The stage-cut problem of one configuration as plain integers, and the value of one answer.

Groups of layers form a DAG and are numbered in topological order. Partition them into exactly `stages` non-empty stages
whose quotient is acyclic, within memory, so that the closed-form step time is least:

    tail_s   = T_s + max over cut edges from s to r of (lag + tail_r)       T_s: work of stage s per microbatch
    depth_s  = 1 + max over the stages r that follow s of depth_r
    memory_s = sum of state + in_flight_s * sum of kept + at work, in_flight_s = min(m, depth_s) for 1F1B, m for GPipe
    J        = (m - 1) * max_s T_s + max_s tail_s + max_s finish_s

Work, kept and at work are those of one level of recomputation per stage: of those that fit, the one with the least
work. A lighter stage never makes another one heavier, so that choosing for each stage alone is best.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmplan.cost_models.layout import RecomputeLevel
from mmplan.planner.schedules.in_flight import IntArray, in_flight, in_flight_counts
from mmplan.scenario.schedule_names import ScheduleName


@dataclass(frozen=True, kw_only=True, slots=True)
class CutEdge:
    """A tensor from group `producer` to group `consumer`; `lag_ns` is paid when they lie in different stages."""

    producer: int
    consumer: int
    lag_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CutTie:
    """A matrix that the groups `table` and `head` read. A rank with one of them alone pays `sum_ns` at the end of the
    step, and a stage with `head` alone `copy_ns` for its copy."""

    table: int
    head: int
    sum_ns: int
    copy_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One way of recomputing: work and kept activations of each group, and what a stage needs at work beside them;
    `state_bytes` in place of the problem's."""

    name: RecomputeLevel = "none"
    work_ns: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    working_bytes: int = 0
    state_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StageKind:
    """Stages on the same mesh and pools of devices: which of the problem's levels they have, their memory, what each
    group adds to the end of the step there, and the `mesh` whose groups alone they may hold (`CutProblem.mesh_of`)."""

    levels: tuple[int, ...]
    capacity_bytes: int
    finish_ns: tuple[int, ...]
    finish_fixed_ns: int
    mesh: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CutProblem:
    """One configuration in whole nanoseconds and bytes; every tuple has one entry per group.

    `levels`: ways of recomputing of which each stage takes one; `work_ns`, `kept_bytes` and `state_bytes` are then the
    least of each group, and without levels they are the only way. `kinds`, `kind_of`: kinds of stages and that of each
    stage, where devices differ; `capacity_bytes` is then the most of any, and `finish_ns` and `finish_fixed_ns` the
    least.

    `finish_ns` is the group's part of gradient all-reduce and optimizer; a stage with at least one `trainable` group
    pays `finish_fixed_ns` once on top. `capacity_bytes` is what states and activations of a stage may take.

    `mesh_of`: number of the mesh of each group, where not all have one. A stage holds groups of its kind's mesh, at the
    levels of its kind; stages of lower meshes come first.

    `ties`: what stages pay that hold copies of one matrix, on top of `finish_ns`.
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
    levels: tuple[Level, ...] = ()
    kinds: tuple[StageKind, ...] = ()
    kind_of: tuple[int, ...] = ()
    mesh_of: tuple[int, ...] = ()
    ties: tuple[CutTie, ...] = ()

    def __post_init__(self) -> None:
        if any(edge.producer >= edge.consumer for edge in self.edges):
            raise ValueError("groups are not numbered in topological order")
        if self.stages < 1 or self.microbatches < 1:
            raise ValueError(f"{self.stages} stages, {self.microbatches} microbatches: both must be positive")

    @property
    def groups(self) -> int:
        return len(self.work_ns)

    @property
    def choices(self) -> tuple[Level, ...]:
        """At least one level."""
        return self.levels or (Level(work_ns=self.work_ns, kept_bytes=self.kept_bytes),)

    def kind(self, stage: int) -> StageKind:
        """Levels and memory of a stage."""
        if self.kinds:
            return self.kinds[self.kind_of[stage]]
        return StageKind(
            levels=tuple(range(len(self.choices))),
            capacity_bytes=self.capacity_bytes,
            finish_ns=self.finish_ns,
            finish_fixed_ns=self.finish_fixed_ns,
        )

    def with_capacity(self, capacity_bytes: int) -> "CutProblem":
        """The same with that much memory on every device."""
        kinds = tuple(replace(kind, capacity_bytes=capacity_bytes) for kind in self.kinds)
        return replace(self, capacity_bytes=capacity_bytes, kinds=kinds)

    @property
    def least_working_bytes(self) -> int:
        return min(level.working_bytes for level in self.choices)

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
    """What one answer is worth; one entry per stage, stages numbered in topological order."""

    objective_ns: int
    stage_memory_bytes: tuple[int, ...]
    stage_levels: tuple[RecomputeLevel, ...]
    fits: bool


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
    if any(problem.kind(stage).mesh != mesh for stage, mesh in zip(stage_of, problem.mesh_of, strict=False)):
        raise ValueError("a group lies on a stage of another mesh")
    finish_ns = [0] * problem.stages
    for group, stage in enumerate(stage_of):
        finish_ns[stage] += problem.kind(stage).finish_ns[group]
    for stage in {stage for group, stage in enumerate(stage_of) if problem.trainable[group]}:
        finish_ns[stage] += problem.kind(stage).finish_fixed_ns
    for tie in problem.ties:
        if stage_of[tie.table] != stage_of[tie.head]:
            finish_ns[stage_of[tie.table]] += tie.sum_ns
            finish_ns[stage_of[tie.head]] += tie.sum_ns + tie.copy_ns
    cut = [edge for edge in problem.edges if stage_of[edge.producer] != stage_of[edge.consumer]]
    cut.sort(key=lambda edge: -stage_of[edge.producer])
    depth = [1] * problem.stages
    for edge in cut:
        sender, receiver = stage_of[edge.producer], stage_of[edge.consumer]
        depth[sender] = max(depth[sender], 1 + depth[receiver])
    chosen = _levels(problem, stage_of, depth)
    work_ns = [work for _, work, _, _ in chosen]
    tail_ns = list(work_ns)
    for edge in cut:
        sender, receiver = stage_of[edge.producer], stage_of[edge.consumer]
        tail_ns[sender] = max(tail_ns[sender], work_ns[sender] + edge.lag_ns + tail_ns[receiver])
    return CutValue(
        objective_ns=(problem.microbatches - 1) * max(work_ns) + max(tail_ns) + max(finish_ns),
        stage_memory_bytes=tuple(memory for memory, _, _, _ in chosen),
        stage_levels=tuple(name for _, _, name, _ in chosen),
        fits=all(fits for _, _, _, fits in chosen),
    )


def _levels(
    problem: CutProblem, stage_of: Sequence[int], depth: Sequence[int]
) -> list[tuple[int, int, RecomputeLevel, bool]]:
    """(memory, work, level, fits) of each stage: the least work that fits, and where nothing does the least memory."""
    ways = [
        (
            level,
            _sums(problem, stage_of, level.work_ns),
            _sums(problem, stage_of, level.kept_bytes),
            _sums(problem, stage_of, level.state_bytes or problem.state_bytes),
        )
        for level in problem.choices
    ]
    chosen = []
    for stage in range(problem.stages):
        alive, kind = in_flight(problem.schedule, problem.microbatches, depth[stage]), problem.kind(stage)
        options = []
        for level, work, kept, state in (ways[index] for index in kind.levels):
            memory = state[stage] + alive * kept[stage] + level.working_bytes
            options.append((memory, work[stage], level.name, memory <= kind.capacity_bytes))
        fitting = [one for one in options if one[3]]
        chosen.append(min(fitting, key=lambda one: one[1]) if fitting else min(options, key=lambda one: one[0]))
    return chosen


def _sums(problem: CutProblem, stage_of: Sequence[int], values: Sequence[int]) -> list[int]:
    """Of a per-group quantity, by stage."""
    sums = [0] * problem.stages
    for stage, value in zip(stage_of, values, strict=True):
        sums[stage] += value
    return sums
