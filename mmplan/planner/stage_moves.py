"""What one more stage costs: every difference of two upsets that can be a stage, with the sums the DP needs.

Arrays have one row per move; a move leads from the upset `below` to the upset `above`, its stage is the difference.
"""

from dataclasses import dataclass

import numpy as np

from mmplan.planner.cut_problem import CutEdge, CutProblem
from mmplan.planner.upsets import BoolArray, IntArray, Upsets, sums_over

NONE = -1  # lag where no edge leads into the stage: below every real lag


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """Stages that respect the cap on work and fit into memory at least at the end of the pipeline.

    `work_ns` is the least; [level, moves] `level_work_ns`, `level_kept_bytes` and `level_state_bytes` are those of each
    level of recomputation, as are `level_path_ns` and `level_encoded_bytes` (`cut_problem.Level`), [kind, moves]
    `kind_finish_ns` of each kind of stage. `encoding[i]`: the stage has layers that run several microbatches at once.
    `first[u]`, `count[u]`: the moves that start from upset u. With w over the frontier slots of an upset: `takes[i, w]`
    says that slot w of `below` is in the stage; `carried[i, w]` is the slot of `below` that holds the same producer as
    slot w of `above` (-1: none); `lag_ns[i, w]` the largest lag from that producer into the stage (-1: no edge).
    `mesh[i]`: the mesh of the stage.
    """

    above: IntArray
    work_ns: IntArray
    level_state_bytes: IntArray
    level_work_ns: IntArray
    level_kept_bytes: IntArray
    level_path_ns: IntArray
    level_encoded_bytes: IntArray
    encoding: BoolArray
    kind_finish_ns: IntArray
    takes: BoolArray
    carried: IntArray
    lag_ns: IntArray
    mesh: IntArray
    first: IntArray
    count: IntArray


def list_moves(problem: CutProblem, upsets: Upsets, cap_ns: int) -> Moves:
    """All stages with work of at most `cap_ns`."""
    values = (problem.work_ns, problem.state_bytes, problem.kept_bytes, problem.trainable)
    work_ns, state_bytes, kept_bytes, trainable = (sums_over(upsets.member, of_group) for of_group in values)
    least_bytes = state_bytes + problem.least_in_flight * kept_bytes
    room_bytes = problem.capacity_bytes - problem.least_working_bytes
    below, above = upsets.below, upsets.above
    least_ns = int(work_ns[-1]) - (problem.stages - 1) * cap_ns  # what the other stages cannot hold
    stage_ns = work_ns[above] - work_ns[below]
    allowed: BoolArray = (stage_ns <= cap_ns) & (stage_ns >= least_ns)
    allowed &= least_bytes[above] - least_bytes[below] <= room_bytes
    mesh = np.zeros(len(below), dtype=np.int64)
    if problem.mesh_of:
        meshes = np.array(problem.mesh_of)
        counts = np.stack([upsets.member @ (meshes == one).astype(np.int64) for one in range(meshes.max() + 1)])
        inside = counts[:, above] > counts[:, below]
        allowed &= inside.sum(axis=0) == 1
        mesh = inside.argmax(axis=0)
    below, above = below[allowed], above[allowed]
    kinds, none = problem.kinds or (problem.kind(0),), (0,) * problem.groups
    fixed_ns = np.array([kind.finish_fixed_ns for kind in kinds])[:, None] * (trainable[above] > trainable[below])
    count = np.bincount(below, minlength=upsets.count).astype(np.int64)
    old, new = upsets.frontier[below], upsets.frontier[above]
    same = (new[:, :, None] == old[:, None, :]) & (new[:, :, None] >= 0)
    return Moves(
        above=above,
        work_ns=stage_ns[allowed],
        level_state_bytes=_by_level(
            upsets, below, above, [level.state_bytes or problem.state_bytes for level in problem.choices]
        ),
        level_work_ns=_by_level(upsets, below, above, [level.work_ns for level in problem.choices]),
        level_kept_bytes=_by_level(upsets, below, above, [level.kept_bytes for level in problem.choices]),
        level_path_ns=_by_level(upsets, below, above, [level.path_ns or level.work_ns for level in problem.choices]),
        level_encoded_bytes=_by_level(upsets, below, above, [one.encoded_bytes or none for one in problem.choices]),
        encoding=_by_level(upsets, below, above, [problem.encoded or none])[0] > 0,
        kind_finish_ns=_by_level(upsets, below, above, [kind.finish_ns for kind in kinds])
        + fixed_ns
        + _tied_ns(problem, upsets, below, above),
        takes=(old >= 0) & upsets.member[above[:, None], old],
        carried=np.where(same.any(axis=2), same.argmax(axis=2), -1),
        lag_ns=_new_lags(problem, upsets, below, above),
        mesh=mesh[allowed],
        first=np.cumsum(count) - count,
        count=count,
    )


def _by_level(upsets: Upsets, below: IntArray, above: IntArray, of_groups: list[tuple[int, ...]]) -> IntArray:
    """[level, moves] sums over each stage."""
    sums = [sums_over(upsets.member, of_group) for of_group in of_groups]
    return np.stack([values[above] - values[below] for values in sums])


def _tied_ns(problem: CutProblem, upsets: Upsets, below: IntArray, above: IntArray) -> IntArray:
    """[moves] what each stage pays for matrices of which another one has a copy."""
    tied_ns = np.zeros(len(below), dtype=np.int64)
    for tie in problem.ties:
        table, head = (upsets.member[above, group] & ~upsets.member[below, group] for group in (tie.table, tie.head))
        tied_ns += (table ^ head) * tie.sum_ns + (head & ~table) * tie.copy_ns
    return tied_ns


def _new_lags(problem: CutProblem, upsets: Upsets, below: IntArray, above: IntArray) -> IntArray:
    """[moves, slots] the largest lag from each frontier producer of `above` into the stage, NONE without an edge."""
    new = upsets.frontier[above]
    lags = np.full(new.shape, NONE, dtype=np.int64)
    consumers, lags_ns = _fan_out(problem)
    for turn in range(consumers.shape[1]):
        consumer = np.where(new >= 0, consumers[new, turn], -1)
        rows, slots = np.nonzero(consumer >= 0)
        group = consumer[rows, slots]
        inside = upsets.member[above[rows], group] & ~upsets.member[below[rows], group]
        hit = (rows[inside], slots[inside])
        lags[hit] = np.maximum(lags[hit], lags_ns[new[hit], turn])
    return lags


def _fan_out(problem: CutProblem) -> tuple[IntArray, IntArray]:
    """[groups, most consumers] the consumers of each group and their lags, padded with -1."""
    lists: list[list[CutEdge]] = [[] for _ in range(problem.groups)]
    for edge in problem.edges:
        lists[edge.producer].append(edge)
    widest = max(1, max(map(len, lists)))
    consumers = np.full((problem.groups, widest), -1, dtype=np.int64)
    lags_ns = np.full((problem.groups, widest), NONE, dtype=np.int64)
    for producer, edges in enumerate(lists):
        for turn, edge in enumerate(edges):
            consumers[producer, turn], lags_ns[producer, turn] = edge.consumer, edge.lag_ns
    return consumers, lags_ns
