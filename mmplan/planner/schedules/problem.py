"""What a schedule is made for: stages on ranks, seconds and memory of their work, and how long tensors are on the way.

F is a forward, I the input-gradient part of a backward, W its weight-gradient part and B both in one. A stage through
which no gradient flows has only F; one that trains nothing (a frozen language model behind a trained encoder) has no W.
Memory is in any unit: bytes, or activations of one microbatch.
"""

from dataclasses import dataclass
from typing import Literal

Role = Literal["encoder", "backbone", "generator"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """One stage. Tuples have one entry per microbatch; `input_s` and `weight_s` are empty where there is no such work.

    Attributes:
        rank: the pipeline rank that holds the stage; several stages may share one.
        skipped: microbatches that the stage does not work on, as when replicas of an encoder share the microbatches.
        held: memory a microbatch takes from the start of its forward on. I releases `released_by_input` of it, W the
            rest; B, or I where no W follows, releases all. A stage without backward holds nothing.
    """

    rank: int
    forward_s: tuple[float, ...]
    input_s: tuple[float, ...] = ()
    weight_s: tuple[float, ...] = ()
    held: tuple[float, ...] = ()
    released_by_input: float = 0.5
    role: Role = "backbone"
    skipped: frozenset[int] = frozenset()

    @property
    def has_backward(self) -> bool:
        return bool(self.input_s)

    @property
    def has_weight(self) -> bool:
        return bool(self.weight_s)

    def seconds(self, kind: str, microbatch: int) -> float:
        """Seconds of F, I, W or B."""
        if kind == "F":
            return self.forward_s[microbatch]
        input_s = self.input_s[microbatch] if kind != "W" else 0.0
        weight_s = self.weight_s[microbatch] if kind != "I" and self.weight_s else 0.0
        return input_s + weight_s

    def memory_change(self, kind: str, microbatch: int) -> float:
        """Memory taken (F) or released (negative) by an action."""
        held = self.held[microbatch] if self.held and self.input_s else 0.0
        if kind == "F":
            return held
        if kind == "B" or not self.weight_s:
            return -held
        return -held * (self.released_by_input if kind == "I" else 1 - self.released_by_input)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEdge:
    """Tensor from `source` to `target`, on the way for `forward_s`; its gradient, if any, returns in `backward_s`.

    Inside a rank both are 0.
    """

    source: int
    target: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    carries_grad: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleProblem:
    """Stages in topological order of the edges; `capacity` is the memory of each rank (`inf`: no limit)."""

    stages: tuple[StageWork, ...]
    edges: tuple[StageEdge, ...]
    microbatches: int
    capacity: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.microbatches < 1 or not self.stages:
            raise ValueError(f"{len(self.stages)} stages and {self.microbatches} microbatches must both be positive")
        for index, stage in enumerate(self.stages):
            if not 0 <= stage.rank < len(self.capacity):
                raise ValueError(f"stage {index} lies on rank {stage.rank}, there are {len(self.capacity)}")
            wanted = {"forward_s": True, "input_s": False, "weight_s": False, "held": False}
            for name, always in wanted.items():
                length = len(getattr(stage, name))
                if length != self.microbatches and (always or length):
                    raise ValueError(f"stage {index}: {name} has {length} entries for {self.microbatches} microbatches")
            if stage.weight_s and not stage.input_s:
                raise ValueError(f"stage {index} has weight gradients and no backward")
        for edge in self.edges:
            if not 0 <= edge.source < edge.target < len(self.stages):
                raise ValueError(f"edge {edge.source} -> {edge.target} does not follow the order of the stages")
            if self.stages[edge.source].rank == self.stages[edge.target].rank and (edge.forward_s or edge.backward_s):
                raise ValueError(f"edge {edge.source} -> {edge.target} takes time inside one rank")
            both = self.stages[edge.source].has_backward and self.stages[edge.target].has_backward
            if edge.carries_grad and not both:
                raise ValueError(f"edge {edge.source} -> {edge.target} carries a gradient between stages without one")

    @property
    def ranks(self) -> int:
        return len(self.capacity)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank, in topological order."""
        return tuple(index for index, stage in enumerate(self.stages) if stage.rank == rank)

    def depths(self) -> tuple[int, ...]:
        """Stages on the longest path from each stage to a sink, itself included."""
        depths = [1] * len(self.stages)
        for edge in sorted(self.edges, key=lambda edge: -edge.source):
            depths[edge.source] = max(depths[edge.source], 1 + depths[edge.target])
        return tuple(depths)

    def is_chain(self) -> bool:
        """Whether every stage feeds the next one and no other."""
        pairs = {(edge.source, edge.target) for edge in self.edges}
        return pairs == {(stage, stage + 1) for stage in range(len(self.stages) - 1)}

    def load_s(self, rank: int) -> float:
        """Seconds of all work of a rank."""
        return sum(
            stage.seconds("F", k) + (stage.seconds("B", k) if stage.has_backward else 0.0)
            for stage in self.stages
            if stage.rank == rank
            for k in range(self.microbatches)
            if k not in stage.skipped
        )


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """Why a family has no schedule for a problem, in one sentence. `weightless`: for want of this stage's weight
    gradients."""

    reason: str
    weightless: int | None = None
