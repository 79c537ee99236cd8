"""A program as columns of numbers: one row per action, rank by rank, in program order.

The same information as `Program` at a tenth of its size, for lowering and timing of large programs.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmplan.planner.program import Action, ActionKind, Program, RankProgram

Integers = NDArray[np.int64]

KINDS: tuple[ActionKind, ...] = ("F", "B", "I", "W", "SEND", "RECV", "REDUCE", "TIE", "STEP")
F, B, I, W, SEND, RECV, REDUCE, TIE, STEP = range(len(KINDS))  # noqa: E741


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProgramColumns:
    """All arrays but the first four have one entry per action; `copies` None: one of each.

    ranks, stages, replicas: of each listed rank; `stages` is its first stage. first: `[ranks + 1]`, where the actions
    of each listed rank begin. kind: index into `KINDS`. peer: rank at the other end or -1. tensor: index into
    `tensors` or -1.
    """

    ranks: Integers
    stages: Integers
    replicas: Integers
    first: Integers
    kind: Integers
    stage: Integers
    microbatch: Integers
    peer: Integers
    tensor: Integers
    bytes: Integers
    tensors: tuple[str, ...]
    microbatches: int
    replica_count: int
    copies: Integers | None = None

    @property
    def size(self) -> int:
        return len(self.kind)

    @property
    def row(self) -> Integers:
        """Index of the listed rank of every action."""
        return np.repeat(np.arange(len(self.ranks)), np.diff(self.first))

    @property
    def is_gradient(self) -> NDArray[np.bool_]:
        """For each of `tensors`, whether it is a gradient."""
        return np.array(["<" in name for name in self.tensors], dtype=bool)


def columns_of(program: Program) -> ProgramColumns:
    """The columns of a program."""
    actions = [action for rank in program.ranks for action in rank.actions]
    kinds = {kind: index for index, kind in enumerate(KINDS)}
    tensors: dict[str, int] = {"": -1}
    for action in actions:
        if action.tensor not in tensors:
            tensors[action.tensor] = len(tensors) - 1
    return ProgramColumns(
        ranks=_integers([rank.rank for rank in program.ranks]),
        stages=_integers([rank.stage for rank in program.ranks]),
        replicas=_integers([rank.replica for rank in program.ranks]),
        first=_integers(np.cumsum([0, *(len(rank.actions) for rank in program.ranks)])),
        kind=_integers([kinds[action.kind] for action in actions]),
        stage=_integers([action.stage for action in actions]),
        microbatch=_integers([action.microbatch for action in actions]),
        peer=_integers([action.peer for action in actions]),
        tensor=_integers([tensors[action.tensor] for action in actions]),
        bytes=_integers([action.bytes for action in actions]),
        tensors=tuple(tensors)[1:],
        microbatches=program.microbatches,
        replica_count=program.replicas,
        copies=_integers([action.copies for action in actions]) if any(a.copies > 1 for a in actions) else None,
    )


def program_of(columns: ProgramColumns) -> Program:
    """The program of some columns; inverse of `columns_of`."""
    return Program(
        ranks=tuple(rank_program(columns, row) for row in range(len(columns.ranks))),
        microbatches=columns.microbatches,
        replicas=columns.replica_count,
    )


def rank_program(columns: ProgramColumns, row: int) -> RankProgram:
    """The program of one listed rank alone, which is all that a process needs of a large one."""
    span = slice(int(columns.first[row]), int(columns.first[row + 1]))
    names = (*columns.tensors, "")  # -1 is the last
    fields = (columns.kind, columns.stage, columns.microbatch, columns.peer, columns.tensor, columns.bytes)
    copies = [1] * (span.stop - span.start) if columns.copies is None else columns.copies[span].tolist()
    rows = zip(*(field[span].tolist() for field in fields), copies, strict=True)
    actions = tuple(
        Action(KINDS[kind], stage, microbatch, peer, names[tensor], size, copied)
        for kind, stage, microbatch, peer, tensor, size, copied in rows
    )
    return RankProgram(
        rank=int(columns.ranks[row]),
        stage=int(columns.stages[row]),
        replica=int(columns.replicas[row]),
        actions=actions,
    )


def _integers(values: object) -> Integers:
    return np.array(values, dtype=np.int64)
