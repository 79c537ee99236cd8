"""The lowered program: per rank one list of actions with every send and receive explicit.

The simulator and the executor consume this same value. Only ranks with tp index 0 are listed; the other ranks of a
tensor-parallel group do the same at the same time. Both ends of a transfer name the same `tensor`, and all transfers
between two ranks stand in one global order on both, so that libraries that match by order cannot mix them up.
"""

from dataclasses import dataclass
from typing import Literal

ActionKind = Literal["F", "B", "I", "W", "SEND", "RECV", "REDUCE", "TIE", "STEP"]

AHEAD = "+"

Meeting = tuple[str, int, int]  # REDUCE, stage, 0; or TIE, its number, replica


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a rank does.

    F, B, I, W compute `stage` on `microbatch`. SEND and RECV are asynchronous: SEND hands over a tensor its rank has
    just produced, RECV posts the buffer early; the compute action that needs the tensor waits for it. `tensor` is
    `producer>consumer` (layer ids) for an activation and `producer<consumer` for its gradient; behind an activation
    `AHEAD` says that it is of the next step's microbatch, whose forward reads it then. To a replica of another mesh
    the listed rank sends `copies`, one for each shard that takes its rows from it, of the part of the tensor that
    begins at byte `offset` (0 until a rank's own program is made) of `whole_bytes` (0: it is all of it); it gets
    one from each shard that has some of its rows. REDUCE sums the stage's gradients over its replicas; TIE then
    sums over stages the gradient of a matrix that each of them holds (`ties.py`), whose number is in `microbatch`;
    STEP updates the weights. `bytes` of all but SEND and RECV are those of the buffers handed to collectives
    meanwhile: among the replicas (`shared_bytes.py`), in a TIE among the ranks of a replica that hold the matrix.
    """

    kind: ActionKind
    stage: int
    microbatch: int = -1
    peer: int = -1  # rank at the other end
    tensor: str = ""
    bytes: int = 0
    copies: int = 1
    offset: int = 0
    whole_bytes: int = 0

    def __str__(self) -> str:
        if self.kind in ("SEND", "RECV"):
            return f"{self.stage}{self.kind}{self.microbatch}[{self.tensor}]@{self.peer}"
        return f"{self.stage}{self.kind}{self.microbatch}" if self.microbatch >= 0 else f"{self.stage}{self.kind}"


def is_ahead(tensor: str) -> bool:
    """Whether it is made in a step for the next one."""
    return tensor.endswith(AHEAD)


def named_by_layers(tensor: str) -> str:
    """The name without the mark of the next step."""
    return tensor.removesuffix(AHEAD)


def target_layer(tensor: str) -> str:
    """The layer that a tensor of this name is sent to."""
    tensor = named_by_layers(tensor)
    mark = ">" if ">" in tensor else "<"
    producer, consumer = tensor.split(mark)
    return consumer if mark == ">" else producer


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgram:
    """`unsent`: tensors that it makes as well as others of its group, which send them."""

    rank: int
    stage: int
    replica: int
    actions: tuple[Action, ...]
    unsent: frozenset[str] = frozenset()


def meeting(rank: RankProgram, action: Action) -> Meeting:
    """Ranks that sum together have the same: the replicas of a stage, or those in a replica that hold a matrix."""
    return ("TIE", action.microbatch, rank.replica) if action.kind == "TIE" else ("REDUCE", action.stage, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Programs of all ranks with tp index 0, ordered by rank; `replicas` of the plan's dp are listed."""

    ranks: tuple[RankProgram, ...]
    microbatches: int
    replicas: int
