"""The stage-cut problem of one configuration as plain integers, and the value of one answer.

Groups of layers form a DAG and are numbered in topological order. Partition them into exactly `stages` non-empty stages
whose quotient is acyclic, within memory, so that the closed-form step time is least:

    tail_s   = T_s + max over cut edges from s to r of (lag + tail_r)       T_s: work of stage s per microbatch
    depth_s  = 1 + max over the stages r that follow s of depth_r
    memory_s = sum of state + in_flight_s * sum of kept + at work, in_flight_s = min(m, depth_s) for 1F1B, m for GPipe
    J        = (m - 1) * max_s T_s + max_s tail_s + max_s finish_s

Of layers that run k microbatches at once T_s has a k-th part of their work and tail_s, where stages follow them, all of
it: the stages behind wait for the first of these runs and the last one waits for them. Where the busiest stage has such
layers itself it may be up to (1 - 1/k) of their work sooner. A stage with such layers that feeds others is k deeper
(`stage_depth`), and of such layers it holds whole groups of k (`encoded_in_flight`).

Work, kept and at work are those of one level of recomputation per stage: of those that fit, the one with the least
work. A lighter stage never makes another one heavier, so that choosing for each stage alone is best.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from mmplan.cost_models.layout import RecomputeLevel
from mmplan.planner.schedules.in_flight import (
    IntArray,
    encoded_in_flight,
    in_flight,
    in_flight_counts,
    stage_depth,
)
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
    `state_bytes` in place of the problem's. Where layers run several microbatches at once, `path_ns`: work of each
    group with all of these, and `encoded_bytes`: what of `kept_bytes` such layers keep (empty: nothing)."""

    name: RecomputeLevel = "none"
    work_ns: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    working_bytes: int = 0
    state_bytes: tuple[int, ...] = ()
    path_ns: tuple[int, ...] = ()
    encoded_bytes: tuple[int, ...] = ()


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

    `encoded`: of each group, whether it has layers that run `batch_factor` microbatches at once; empty: none has.
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
    encoded: tuple[bool, ...] = ()
    batch_factor: int = 1

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

    def held(self, depth: int, encoding: bool) -> tuple[int, int]:
        """Microbatches that a stage holds at once of its layers, and of those that run several at once."""
        alive = in_flight(self.schedule, self.microbatches, depth)
        return alive, int(encoded_in_flight(self.microbatches, alive, self.batch_factor)) if encoding else 0

    @property
    def deepest(self) -> int:
        """Most depth that a stage can have."""
        ahead = self.batch_factor if any(self.encoded) and self.batch_factor > 1 else 0
        return self.stages + (self.stages - 1) * ahead

    @property
    def least_in_flight(self) -> int:
        """Of a stage at the end of the pipeline."""
        return in_flight(self.schedule, self.microbatches, 1)

    @property
    def most_in_flight(self) -> int:
        """Of the first of all stages in a row."""
        return in_flight(self.schedule, self.microbatches, self.deepest)


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
    encoding = {stage for stage, encoded in zip(stage_of, problem.encoded, strict=False) if encoded}
    depth = [1] * problem.stages
    for edge in cut:
        sender, receiver = stage_of[edge.producer], stage_of[edge.consumer]
        factor = problem.batch_factor if sender in encoding else 1
        depth[sender] = max(depth[sender], stage_depth(depth[receiver], factor))
    chosen = _levels(problem, stage_of, depth, encoding)
    work_ns = [one.work_ns for one in chosen]
    tail_ns = [one.path_ns for one in chosen]
    for edge in cut:
        sender, receiver = stage_of[edge.producer], stage_of[edge.consumer]
        tail_ns[sender] = max(tail_ns[sender], chosen[sender].path_ns + edge.lag_ns + tail_ns[receiver])
    return CutValue(
        objective_ns=(problem.microbatches - 1) * max(work_ns) + max(tail_ns) + max(finish_ns),
        stage_memory_bytes=tuple(one.memory_bytes for one in chosen),
        stage_levels=tuple(one.level for one in chosen),
        fits=all(one.fits for one in chosen),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chosen:
    """A stage at its level."""

    memory_bytes: int
    work_ns: int
    path_ns: int
    level: RecomputeLevel
    fits: bool


def _levels(
    problem: CutProblem, stage_of: Sequence[int], depth: Sequence[int], encoding: Collection[int]
) -> list[_Chosen]:
    """Each stage at the level with the least work that fits, and where nothing does with the least memory."""
    none = (0,) * problem.groups
    ways = [
        tuple(
            _sums(problem, stage_of, values)
            for values in (
                level.work_ns,
                level.path_ns or level.work_ns,
                level.kept_bytes,
                level.encoded_bytes or none,
                level.state_bytes or problem.state_bytes,
            )
        )
        for level in problem.choices
    ]
    chosen = []
    for stage in range(problem.stages):
        kind, (alive, together) = problem.kind(stage), problem.held(depth[stage], stage in encoding)
        options = []
        for index in kind.levels:
            work_ns, path_ns, kept_bytes, encoded_bytes, state_bytes = (values[stage] for values in ways[index])
            memory_bytes = state_bytes + alive * (kept_bytes - encoded_bytes) + together * encoded_bytes
            memory_bytes += problem.choices[index].working_bytes
            options.append(
                _Chosen(
                    memory_bytes=memory_bytes,
                    work_ns=work_ns,
                    path_ns=path_ns,
                    level=problem.choices[index].name,
                    fits=memory_bytes <= kind.capacity_bytes,
                )
            )
        fitting = [one for one in options if one.fits]
        leanest = min(options, key=lambda one: one.memory_bytes)
        chosen.append(min(fitting, key=lambda one: one.work_ns, default=leanest))
    return chosen


def _sums(problem: CutProblem, stage_of: Sequence[int], values: Sequence[int]) -> list[int]:
    """Of a per-group quantity, by stage."""
    sums = [0] * problem.stages
    for stage, value in zip(stage_of, values, strict=True):
        sums[stage] += value
    return sums
