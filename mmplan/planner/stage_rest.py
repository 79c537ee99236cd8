"""What the stages not placed yet must cost at least, per upset and group, for pruning labels of the DP.

Everything here is a relaxation: it forgets memory, divisibility of work, or all paths but one.
"""

from dataclasses import dataclass

import numpy as np

from mmplan.planner.cut_problem import CutProblem
from mmplan.planner.floors import bottleneck_floor, finish_floor, heaviest_paths
from mmplan.planner.upsets import IntArray, Upsets, sums_over


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """Per upset: sums over the groups outside; `mesh_work_ns` and `mesh_groups` [mesh, u] those of each mesh.
    Per group g: over g and all its ancestors, which lie outside with it.

    `path_ns[g]` is the heaviest path that ends with g, `hop_ns[g]` the least lag on any edge between these groups, and
    `path_kept_bytes[g]` what they keep. `chain_end[u]` is the last of the groups outside upset u where these form one
    chain, else -1. `floor_*` bound the value of any complete cut.
    """

    work_ns: IntArray
    mesh_work_ns: IntArray
    mesh_groups: IntArray
    state_bytes: IntArray
    kept_bytes: IntArray
    groups: IntArray
    chain_end: IntArray
    path_ns: IntArray
    hop_ns: IntArray
    path_kept_bytes: IntArray
    floor_bottleneck_ns: int
    floor_path_ns: int
    floor_finish_ns: int


def measure_rest(problem: CutProblem, upsets: Upsets, busiest_ns: int = 0) -> Rest:
    """Tables for one problem over its upsets."""
    outside = ~upsets.member
    ancestors = _ancestors(problem)
    path_ns = heaviest_paths(problem)
    length, hop_ns = _lengths_and_hops(problem)
    groups = outside.sum(axis=1)
    last = np.where(outside.any(axis=1), problem.groups - 1 - outside[:, ::-1].argmax(axis=1), 0)
    kept = np.array(problem.kept_bytes, dtype=np.int64)
    return Rest(
        work_ns=sums_over(outside, problem.work_ns),
        mesh_work_ns=_by_mesh(problem, upsets, problem.work_ns),
        mesh_groups=_by_mesh(problem, upsets, (1,) * problem.groups),
        state_bytes=sums_over(outside, problem.state_bytes),
        kept_bytes=sums_over(outside, problem.kept_bytes),
        groups=groups.astype(np.int64),
        chain_end=np.where((length[last] == groups) & (groups > 0), last, -1),
        path_ns=path_ns,
        hop_ns=hop_ns,
        path_kept_bytes=ancestors @ kept,
        floor_bottleneck_ns=max(busiest_ns, bottleneck_floor(problem)),
        floor_path_ns=int(path_ns.max()),
        floor_finish_ns=finish_floor(problem),
    )


def _by_mesh(problem: CutProblem, upsets: Upsets, values: tuple[int, ...]) -> IntArray:
    """[mesh, upset] sums over the groups outside; no row where all have one mesh."""
    outside = ~upsets.member
    meshes = range(max(problem.mesh_of, default=-1) + 1)
    rows = [sums_over(outside & (np.array(problem.mesh_of) == mesh), values) for mesh in meshes]
    return np.stack(rows) if rows else np.zeros((0, upsets.count), dtype=np.int64)


def _ancestors(problem: CutProblem) -> IntArray:
    """[g, a] 1 where a is g or leads to g."""
    ancestors = np.eye(problem.groups, dtype=np.int64)
    for edge in sorted(problem.edges, key=lambda edge: edge.consumer):
        ancestors[edge.consumer] |= ancestors[edge.producer]
    return ancestors


def _lengths_and_hops(problem: CutProblem) -> tuple[IntArray, IntArray]:
    """Per group: groups on the longest path that ends with it, and the least lag among its ancestors' edges."""
    length = np.ones(problem.groups, dtype=np.int64)
    unseen = np.iinfo(np.int64).max
    hop_ns = np.full(problem.groups, unseen, dtype=np.int64)
    for edge in sorted(problem.edges, key=lambda edge: edge.consumer):
        length[edge.consumer] = max(length[edge.consumer], 1 + length[edge.producer])
        hop_ns[edge.consumer] = min(hop_ns[edge.consumer], hop_ns[edge.producer], edge.lag_ns)
    hop_ns[hop_ns == unseen] = 0
    return length, hop_ns
