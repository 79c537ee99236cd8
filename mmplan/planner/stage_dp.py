"""The stage cut by an exact dynamic program over upsets, placed from the sinks backwards.

Stages are placed last first, so that tail and depth of whatever a new stage feeds are known. A label is one way to fill
the last k stages with an upset; it carries what can still matter: the busiest stage and the longest finish so far, and
for each producer outside that feeds a stage inside the largest (lag + tail) and depth that wait there. Labels of one
upset compete by Pareto dominance; labels whose completion bound reaches the cutoff die.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from mmplan.planner.cut_problem import CutProblem, evaluate_cut
from mmplan.planner.cut_result import CutResult
from mmplan.planner.floors import busiest_ceiling
from mmplan.planner.pareto import pareto_rows
from mmplan.planner.schedules.in_flight import encoded_in_flight
from mmplan.planner.stage_moves import Moves, list_moves
from mmplan.planner.stage_rest import Rest, measure_rest
from mmplan.planner.stopping import never
from mmplan.planner.upsets import BoolArray, IntArray, Upsets

CHUNK_ROWS = 400_000  # successors made at once: 100 MB
MAX_ROWS = 20_000_000  # successors in all: 20 to 40 s, after which the answer is a bound, not a proof
MAX_WIDTH = 2_000  # labels kept per upset


@dataclass(frozen=True, kw_only=True, slots=True)
class _Labels:
    """One level of the DP as columns; `tail_ns` and `depth` have one column per frontier slot of the label's upset."""

    upset: IntArray
    parent: IntArray
    bottleneck_ns: IntArray
    finish_ns: IntArray
    path_ns: IntArray
    tail_ns: IntArray
    depth: IntArray
    bound_ns: IntArray

    def take(self, rows: IntArray) -> "_Labels":
        return _Labels(**{name: getattr(self, name)[rows] for name in self.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tables:
    """What one run looks up."""

    problem: CutProblem
    upsets: Upsets
    moves: Moves
    rest: Rest
    cap_ns: int
    cutoff_ns: int
    width: int


@dataclass(slots=True)
class _Tally:
    """Work of one run, and the least completion bound among labels that a budget made it give up."""

    given_up_ns: int
    exhausted: bool = False
    rows: int = 0

    def give_up(self, bound_ns: int | None) -> None:
        if bound_ns is not None:
            self.given_up_ns = min(self.given_up_ns, bound_ns)
            self.exhausted = True


def cut_by_dp(
    problem: CutProblem,
    upsets: Upsets,
    *,
    cutoff_ns: int,
    cap_ns: int | None = None,
    busiest_ns: int = 0,
    width: int = MAX_WIDTH,
    max_rows: int = MAX_ROWS,
    stop: Callable[[], bool] = never,
) -> CutResult:
    """The best cut below `cutoff_ns`, or a proof that there is none.

    Args:
        upsets: those of the problem's DAG.
        cap_ns: no stage may work longer, and the bound speaks of cuts within the cap only; None: as the cutoff allows.
        busiest_ns: a proven floor of the busiest stage.
        width: labels kept per upset and level; small widths make a heuristic whose bound is still valid.
        max_rows: budget of label extensions.
        stop: asked before each level and each chunk of it; True ends the run as a spent budget does.
    """
    rest = measure_rest(problem, upsets, busiest_ns)
    allowed_ns = busiest_ceiling(problem, cutoff_ns)
    cap_ns = allowed_ns if cap_ns is None else min(cap_ns, allowed_ns)
    tally = _Tally(given_up_ns=cutoff_ns)
    if cap_ns < rest.floor_bottleneck_ns or problem.stages > problem.groups:
        return _nothing(tally)
    tables = _Tables(
        problem=problem,
        upsets=upsets,
        moves=list_moves(problem, upsets, cap_ns),
        rest=rest,
        cap_ns=cap_ns,
        cutoff_ns=cutoff_ns,
        width=width,
    )
    levels = [_start(tables)]
    for stages_left in range(problem.stages - 1, -1, -1):
        level = None if tally.rows > max_rows else _next_level(tables, levels[-1], stages_left, tally, stop)
        if level is None:
            tally.give_up(int(levels[-1].bound_ns.min()))
            return _nothing(tally)
        levels.append(level)
        if not len(levels[-1].upset):
            return _nothing(tally)
    stage_of = _trace(tables, levels)
    objective_ns = evaluate_cut(problem, stage_of).objective_ns
    bound_ns = min(objective_ns, tally.given_up_ns)
    return CutResult(
        stage_of=stage_of,
        objective_ns=objective_ns,
        bound_ns=bound_ns,
        exhausted=bound_ns < objective_ns,
    )


def _nothing(tally: _Tally) -> CutResult:
    return CutResult(
        stage_of=None,
        objective_ns=None,
        bound_ns=tally.given_up_ns,
        exhausted=tally.exhausted,
    )


def _start(tables: _Tables) -> _Labels:
    """The label of no stage at all."""
    zero = np.zeros(1, dtype=np.int64)
    slots = np.zeros((1, tables.upsets.frontier.shape[1]), dtype=np.int64)
    return _Labels(
        upset=zero,
        parent=zero - 1,
        bottleneck_ns=zero + tables.rest.floor_bottleneck_ns,
        finish_ns=zero + tables.rest.floor_finish_ns,
        path_ns=zero + tables.rest.floor_path_ns,
        tail_ns=slots,
        depth=slots,
        bound_ns=zero,
    )


def _next_level(
    tables: _Tables, labels: _Labels, stages_left: int, tally: _Tally, ended: Callable[[], bool]
) -> _Labels | None:
    """All labels with one more stage that may still lead to a cut below the cutoff; None when it was ended."""
    total = np.cumsum(tables.moves.count[labels.upset])
    parts: list[_Labels] = []
    start = 0
    while start < len(total):
        if ended():
            return None
        done = int(total[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(total, done + CHUNK_ROWS, side="right")))
        tally.rows += int(total[stop - 1]) - done
        part = _extend(tables, labels, np.arange(start, stop), stages_left)
        parts.append(_undominated(part, tables.width, tally))
        start = stop
    if len(parts) == 1:
        return parts[0]
    joined = _Labels(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _Labels.__slots__})
    return _undominated(joined, tables.width, tally)


def _undominated(labels: _Labels, width: int, tally: _Tally) -> _Labels:
    scalars = np.stack([labels.bottleneck_ns, labels.finish_ns, labels.path_ns], axis=1)
    columns = np.concatenate([scalars, labels.tail_ns, labels.depth], axis=1)
    rows, given_up_ns = pareto_rows(labels.upset, labels.bound_ns, columns, width)
    tally.give_up(given_up_ns)
    return labels.take(rows)


def _extend(tables: _Tables, labels: _Labels, chosen: IntArray, stages_left: int) -> _Labels:
    """Every stage that fits, in front of every chosen label, where a cut below the cutoff is still in reach."""
    problem, moves, rest = tables.problem, tables.moves, tables.rest
    count = moves.count[labels.upset[chosen]]
    parent = np.repeat(chosen, count)
    offset = np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count)
    move = moves.first[labels.upset[parent]] + offset
    outside = rest.groups[moves.above[move]]
    fits = (outside >= stages_left) & ((outside == 0) == (stages_left == 0))
    fits &= rest.work_ns[moves.above[move]] <= stages_left * tables.cap_ns
    if problem.mesh_of:
        fits &= moves.mesh[move] == problem.kind(stages_left).mesh
        fits &= _meshes_fit(tables, moves.above[move], stages_left)
    parent, move = parent[fits], move[fits]
    depth = np.where(moves.takes[move], labels.depth[parent], 0).max(axis=1)
    if problem.batch_factor > 1:
        depth += problem.batch_factor * (moves.encoding[move] & (depth > 0))
    depth += 1
    work_ns, path_ns = _least_work(tables, move, depth, stages_left)
    fits = work_ns <= tables.cap_ns
    parent, move, depth, work_ns, path_ns = parent[fits], move[fits], depth[fits], work_ns[fits], path_ns[fits]
    finish_ns = moves.kind_finish_ns[problem.kind_of[stages_left] if problem.kinds else 0, move]
    child = _children(tables, labels, parent, move, depth, (work_ns, path_ns), finish_ns)
    child = child.take(np.flatnonzero(_rest_fits(tables, child, stages_left)))
    bound_ns = _completion_bound(tables, child, stages_left)
    return replace(child, bound_ns=bound_ns).take(np.flatnonzero(bound_ns < tables.cutoff_ns))


def _stages_of_meshes(problem: CutProblem, stages_left: int) -> IntArray:
    """[mesh] how many of the first `stages_left` stages are its."""
    meshes = [problem.kind(stage).mesh for stage in range(stages_left)]
    return np.bincount(meshes, minlength=max(problem.mesh_of) + 1).astype(np.int64)


def _meshes_fit(tables: _Tables, upset: IntArray, stages_left: int) -> BoolArray:
    """[rows] whether the stages left of each mesh can hold what is left of it within the cap."""
    left = _stages_of_meshes(tables.problem, stages_left)
    outside = tables.rest.mesh_groups[:, upset]
    fits: BoolArray = (outside >= left[:, None]).all(axis=0) & ((outside == 0) == (left[:, None] == 0)).all(axis=0)
    return fits & (tables.rest.mesh_work_ns[:, upset] <= left[:, None] * tables.cap_ns).all(axis=0)


def _least_work(tables: _Tables, move: IntArray, depth: IntArray, stage: int) -> tuple[IntArray, IntArray]:
    """[rows] work of a stage, and its part of a path, at the level of recomputation that is the fastest of those that
    fit; beyond any cap where none does."""
    problem, moves, kind = tables.problem, tables.moves, tables.problem.kind(stage)
    alive = problem.in_flight(depth)
    together = encoded_in_flight(problem.microbatches, alive, problem.batch_factor)
    work_ns = np.full(len(move), np.iinfo(np.int64).max, dtype=np.int64)
    path_ns = work_ns.copy()
    for index in kind.levels:
        at_work_bytes, encoded_bytes = problem.choices[index].working_bytes, moves.level_encoded_bytes[index, move]
        need_bytes = moves.level_state_bytes[index, move] + alive * (
            moves.level_kept_bytes[index, move] - encoded_bytes
        )
        fits = need_bytes + together * encoded_bytes + at_work_bytes <= kind.capacity_bytes
        better = fits & (moves.level_work_ns[index, move] < work_ns)
        work_ns[better] = moves.level_work_ns[index, move[better]]
        path_ns[better] = moves.level_path_ns[index, move[better]]
    return work_ns, path_ns


def _children(
    tables: _Tables,
    labels: _Labels,
    parent: IntArray,
    move: IntArray,
    depth: IntArray,
    work_and_path_ns: tuple[IntArray, IntArray],
    finish_ns: IntArray,
) -> _Labels:
    """Labels after putting stage `move`, of this depth, work and finish, in front of label `parent`, row by row."""
    moves, (work_ns, path_ns) = tables.moves, work_and_path_ns
    takes, carried, lag_ns = moves.takes[move], moves.carried[move], moves.lag_ns[move]
    tail_ns = path_ns + np.where(takes, labels.tail_ns[parent], 0).max(axis=1)
    slot, stays, feeds = np.maximum(carried, 0), carried >= 0, lag_ns >= 0
    old_tail_ns = np.where(stays, np.take_along_axis(labels.tail_ns[parent], slot, axis=1), 0)
    old_depth = np.where(stays, np.take_along_axis(labels.depth[parent], slot, axis=1), 0)
    # a stage deeper than m holds as much as one at m, with GPipe all hold m: labels that differ only there are equal
    counted = tables.problem.in_flight(depth)
    return _Labels(
        upset=moves.above[move],
        parent=parent,
        bottleneck_ns=np.maximum(labels.bottleneck_ns[parent], work_ns),
        finish_ns=np.maximum(labels.finish_ns[parent], finish_ns),
        path_ns=np.maximum(labels.path_ns[parent], np.where(feeds.any(axis=1), 0, tail_ns)),
        tail_ns=np.maximum(old_tail_ns, np.where(feeds, lag_ns + tail_ns[:, None], 0)),
        depth=np.maximum(old_depth, np.where(feeds, counted[:, None], 0)),
        bound_ns=np.zeros(len(move), dtype=np.int64),
    )


def _rest_fits(tables: _Tables, labels: _Labels, stages_left: int) -> BoolArray:
    """Whether what is outside would fit if it could be spread evenly: ancestors of a stage lie deeper than it."""
    problem, rest = tables.problem, tables.rest
    producer = tables.upsets.frontier[labels.upset]
    kept_bytes = rest.kept_bytes[labels.upset]
    least = problem.least_in_flight
    more = problem.in_flight(labels.depth + 1) - least
    more_bytes = np.where(producer >= 0, rest.path_kept_bytes[producer] * more, 0).max(axis=1)
    need_bytes = rest.state_bytes[labels.upset] + least * kept_bytes + more_bytes
    fits: BoolArray = need_bytes <= stages_left * (problem.capacity_bytes - problem.least_working_bytes)
    return fits


def _completion_bound(tables: _Tables, labels: _Labels, stages_left: int) -> IntArray:
    """No cut that completes the label is faster: work spread evenly, each path cut no oftener than the cap demands."""
    problem, rest = tables.problem, tables.rest
    producer = tables.upsets.frontier[labels.upset]
    bottleneck_ns = labels.bottleneck_ns
    if stages_left:
        bottleneck_ns = np.maximum(bottleneck_ns, -(-rest.work_ns[labels.upset] // stages_left))
        if problem.mesh_of:
            left = np.maximum(_stages_of_meshes(problem, stages_left), 1)[:, None]
            each_ns = -(-rest.mesh_work_ns[:, labels.upset] // left)
            bottleneck_ns = np.maximum(bottleneck_ns, each_ns.max(axis=0))
    cuts = -(-rest.path_ns[producer] // max(1, tables.cap_ns)) - 1
    in_chain = producer == rest.chain_end[labels.upset][:, None]
    cuts = np.where(in_chain, np.maximum(cuts, stages_left - 1), cuts)
    through_ns = labels.tail_ns + rest.path_ns[producer] + cuts * rest.hop_ns[producer]
    path_ns = np.maximum(labels.path_ns, np.where(producer >= 0, through_ns, 0).max(axis=1))
    bound_ns: IntArray = (problem.microbatches - 1) * bottleneck_ns + path_ns + labels.finish_ns
    return bound_ns


def _trace(tables: _Tables, levels: list[_Labels]) -> tuple[int, ...]:
    """The stages of the best last label; stage 0 was placed last."""
    stage_of = np.zeros(tables.problem.groups, dtype=np.int64)
    row = int(levels[-1].bound_ns.argmin())
    for stage, level in enumerate(reversed(levels[1:])):
        parent = int(level.parent[row])
        before = levels[len(levels) - 2 - stage]
        member = tables.upsets.member
        stage_of[member[level.upset[row]] & ~member[before.upset[parent]]] = stage
        row = parent
    return tuple(int(stage) for stage in stage_of)
