"""Several chunks of layers per pipeline rank, run as interleaved 1F1B: the value of one cut.

Groups keep their topological order and are cut into `stages * v` chunks; chunk c lies on rank c % stages (Narayanan et
al., SC 2021, section 2.2). With p ranks and m microbatches, a multiple of p,

    J = (v m + p - 1) * busiest chunk + sum over the cuts of the largest lag across each + max over ranks of finish

which is (m + (p - 1) / v) times a rank's work where chunks are equal, and then the makespan of the schedule, exactly.
Where chunks differ the schedule, whose order is fixed, is never slower than with all of them as long as the busiest, so
that J is an upper bound of it but for lags: interleaving is not chosen for what it might do.

A rank holds all of its chunks at once. All chunks recompute at one level, as frameworks with several chunks per rank
do: the level is part of the cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmplan.planner.cut_problem import CutProblem, CutTie
from mmplan.planner.problem import least_of
from mmplan.planner.schedules.in_flight import held_by_chunks
from mmplan.planner.upsets import IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkValue:
    """What one cut into chunks is worth."""

    objective_ns: int
    busiest_ns: int
    fits: bool


def each_level(problem: CutProblem) -> Iterator[CutProblem]:
    """The problem at each level of recomputation alone; on unlike devices the level has one way per kind of stage."""
    for name in dict.fromkeys(level.name for level in problem.choices):
        chosen = [index for index, level in enumerate(problem.choices) if level.name == name]
        levels = tuple(problem.choices[index] for index in chosen)
        kinds = tuple(
            replace(kind, levels=tuple(chosen.index(index) for index in kind.levels if index in chosen))
            for kind in problem.kinds
        )
        yield replace(
            problem,
            levels=levels,
            kinds=kinds,
            work_ns=least_of([level.work_ns for level in levels]),
            kept_bytes=least_of([level.kept_bytes for level in levels]),
            state_bytes=least_of([level.state_bytes or problem.state_bytes for level in levels]),
        )


def repeats(ranks: int, chunks: int, microbatches: int) -> int:
    """How often the busiest chunk counts in J."""
    return chunks * microbatches + ranks - 1


def boundary_lags(problem: CutProblem) -> IntArray:
    """[groups + 1] the largest lag of the edges that cross a cut in front of each group; 0 at both ends."""
    lag_ns = np.zeros(problem.groups + 1, dtype=np.int64)
    for edge in problem.edges:
        crossed = slice(edge.producer + 1, edge.consumer + 1)
        lag_ns[crossed] = np.maximum(lag_ns[crossed], edge.lag_ns)
    return lag_ns


def most_held(
    state_bytes: Sequence[int], kept_bytes: Sequence[int], moments: Sequence[Sequence[int]], working_bytes: int
) -> int:
    """Bytes of a rank beside its reserve.

    Args:
        state_bytes, kept_bytes: of each of its chunks; the latter of one microbatch.
        moments: microbatches of each chunk that are held at once, see `held_by_chunks`.
    """
    held = max(sum(n * kept for n, kept in zip(moment, kept_bytes, strict=True)) for moment in moments)
    return held + sum(state_bytes) + working_bytes


def evaluate_chunks(problem: CutProblem, chunks: int, ends: Sequence[int]) -> ChunkValue:
    """The value of a cut at the one level of the problem, whose stages are the ranks.

    Args:
        ends: of each chunk, the number of the first group behind it.

    Raises:
        ValueError: a chunk is empty, or groups are left.
    """
    p, m = problem.stages, problem.microbatches
    firsts = (0, *ends[:-1])
    if len(ends) != p * chunks or ends[-1] != problem.groups or any(a >= b for a, b in zip(firsts, ends, strict=True)):
        raise ValueError(f"{p} x {chunks} chunks end at {list(ends)} of {problem.groups} groups")
    members = [range(first, end) for first, end in zip(firsts, ends, strict=True)]
    busiest_ns, finish_ns, fits = 0, 0, True
    for rank in range(p):
        own, kind = members[rank::p], problem.kind(rank)
        (level,) = (problem.choices[index] for index in kind.levels)
        states = level.state_bytes or problem.state_bytes
        work_ns, state_bytes, kept_bytes, finishes_ns = (
            [sum(of_group[first.start : first.stop]) for first in own]
            for of_group in (level.work_ns, states, level.kept_bytes, kind.finish_ns)
        )
        held_bytes = most_held(state_bytes, kept_bytes, held_by_chunks(p, chunks, m, rank), level.working_bytes)
        trained = any(problem.trainable[group] for chunk in own for group in chunk)
        busiest_ns, fits = max(busiest_ns, *work_ns), fits and held_bytes <= kind.capacity_bytes
        tied_ns = sum(_tied_ns(tie, own) for tie in problem.ties)
        finish_ns = max(finish_ns, sum(finishes_ns) + kind.finish_fixed_ns * trained + tied_ns)
    lags_ns = int(boundary_lags(problem)[list(ends[:-1])].sum())
    objective_ns = repeats(p, chunks, m) * busiest_ns + lags_ns + finish_ns
    return ChunkValue(objective_ns=objective_ns, busiest_ns=busiest_ns, fits=fits)


def _tied_ns(tie: CutTie, chunks: Sequence[range]) -> int:
    """What a rank with these chunks pays for a matrix that is not in one of them alone."""
    table, head = (next((chunk for chunk in chunks if group in chunk), None) for group in (tie.table, tie.head))
    copies = head is not None and head != table
    return tie.copy_ns * copies + tie.sum_ns * ((table is None) != (head is None))
