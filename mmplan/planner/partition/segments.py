"""What a stage can be: all differences of two downsets, at each tensor degree, with their times and memory.

The layers of a segment have many choices of recomputation; only sums count. For each pair (in-flight bytes A, fixed
bytes B) the least time is kept, so runs of equal layers give as many entries as layers. Under a capacity these become
steps: the least time of a stage with y microbatches in flight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmplan.errors import NoPlanFoundError
from mmplan.planner.partition.downsets import list_downsets
from mmplan.planner.partition.replicated_problem import ReplicatedProblem
from mmplan.planner.upsets import BoolArray, IntArray

FloatArray = npt.NDArray[np.float64]
Front = dict[tuple[float, float], float]  # (A, B) -> least seconds
Steps = list[tuple[float, int]]  # (seconds, most microbatches in flight)

# 1,000 downsets of 100 layers are 500,000 segments, some minutes; published layer tables have 43 to 110.
MAX_DOWNSETS = 1_000
MAX_FRONT = 5_000  # choices of a segment; 96 equal layers and an embedding make 194


@dataclass(frozen=True, kw_only=True)
class Segments:
    """One row per segment and tensor degree that fits with one microbatch in flight, sorted by `before`.

    A stage of row r with data degree d takes (time_s[r, j] + transfer_s[r]) / d + resync_s[r] (d - 1) / d with at most
    most[r, j] microbatches in flight; times and `most` grow with j, and a row's last step repeats to the right.
    """

    member: BoolArray
    before: IntArray
    after: IntArray
    tensor_degree: IntArray
    transfer_s: FloatArray
    resync_s: FloatArray
    time_s: FloatArray
    most: IntArray

    @property
    def downsets(self) -> int:
        return len(self.member)


def list_segments(problem: ReplicatedProblem) -> Segments:
    """All rows of the problem.

    Raises:
        NoPlanFoundError: there are too many downsets, or too many choices in one segment.
    """
    layers = len(problem.layers)
    member = list_downsets(layers, problem.edges, MAX_DOWNSETS)
    if member is None:
        raise NoPlanFoundError(f"the layers have more than {MAX_DOWNSETS} downsets")
    pairs = np.argwhere(~(member[:, None, :] & ~member[None, :, :]).any(axis=2))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    rows: list[tuple[int, int, int, float, float, Steps]] = []
    for degree in sorted({degree for layer in problem.layers for degree in layer}):
        able = np.array([degree in layer for layer in problem.layers])
        usable = pairs[~((member[pairs[:, 1]] & ~member[pairs[:, 0]]) & ~able).any(axis=1)]
        held = member[usable[:, 1]] & ~member[usable[:, 0]]
        transfer_s, resync_s = _transfer_s(problem, degree, held), _resync_s(problem, degree, held)
        fronts: dict[int, Front] = {0: {(0.0, 0.0): 0.0}}
        for row, (before, after) in enumerate(usable.tolist()):
            front = _front(problem, degree, np.flatnonzero(held[row]).tolist(), fronts)
            steps = _steps(front, problem.capacity_bytes, problem.devices)
            if steps:
                rows.append((before, after, degree, float(transfer_s[row]), float(resync_s[row]), steps))
    return _as_columns(member, sorted(rows))


def _transfer_s(problem: ReplicatedProblem, degree: int, held: BoolArray) -> FloatArray:
    """[segments] seconds per sample of the edges that enter or leave."""
    total = np.zeros(len(held))
    for producer, consumer in problem.edges:
        for inside, outside in ((producer, consumer), (consumer, producer)):
            if degree in problem.layers[inside]:
                cost_s = problem.layers[inside][degree].transfer_s.get(outside, 0.0)
                total += cost_s * (held[:, inside] & ~held[:, outside])
    return total


def _resync_s(problem: ReplicatedProblem, degree: int, held: BoolArray) -> FloatArray:
    able = [layer.get(degree) for layer in problem.layers]
    parameter_bytes = np.array([at.parameter_bytes if at else 0.0 for at in able])
    total: FloatArray = held @ parameter_bytes * problem.resync_s(1.0)
    return total


def _front(problem: ReplicatedProblem, degree: int, layers: Sequence[int], known: dict[int, Front]) -> Front:
    """Least seconds for each (A, B) of the layers together; `known` grows by the sets of all leading layers."""
    mask = sum(1 << layer for layer in layers)
    if mask not in known:
        shorter = _front(problem, degree, layers[:-1], known)
        front: Front = {}
        for option in problem.layers[layers[-1]][degree].options:
            for (in_flight, fixed), time_s in shorter.items():
                key = (in_flight + option.in_flight_bytes, fixed + option.fixed_bytes)
                front[key] = min(front.get(key, math.inf), time_s + option.time_s)
        if len(front) > MAX_FRONT:
            raise NoPlanFoundError(f"{len(layers)} layers have more than {MAX_FRONT} choices of recomputation")
        known[mask] = front
    return known[mask]


def _steps(front: Front, capacity_bytes: float, devices: int) -> Steps:
    """(seconds, most microbatches in flight), both growing; no stage has more in flight than there are devices."""
    steps: Steps = []
    reached = 0
    for (in_flight, fixed), time_s in sorted(front.items(), key=lambda item: item[1]):
        room_bytes = capacity_bytes - fixed
        most = devices if in_flight * devices <= room_bytes else max(0, math.floor(room_bytes / max(in_flight, 1e-9)))
        if most > reached:
            steps.append((time_s, most))
            reached = most
    return steps


def _as_columns(member: BoolArray, rows: Sequence[tuple[int, int, int, float, float, Steps]]) -> Segments:
    width = max((len(row[5]) for row in rows), default=1)
    padded = np.array([row[5] + [row[5][-1]] * (width - len(row[5])) for row in rows]).reshape(-1, width, 2)
    before, after, degree = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(3))
    return Segments(
        member=member,
        before=before,
        after=after,
        tensor_degree=degree,
        transfer_s=np.array([row[3] for row in rows]),
        resync_s=np.array([row[4] for row in rows]),
        time_s=padded[:, :, 0],
        most=padded[:, :, 1].astype(np.int64),
    )


def chosen_options(
    problem: ReplicatedProblem, degree: int, layers: Sequence[int], in_flight: int
) -> tuple[int, ...] | None:
    """Option of each layer that makes the stage fastest with so many microbatches in flight; None when none fits."""
    best: dict[tuple[float, float], tuple[float, tuple[int, ...]]] = {(0.0, 0.0): (0.0, ())}
    for layer in layers:
        longer: dict[tuple[float, float], tuple[float, tuple[int, ...]]] = {}
        for index, option in enumerate(problem.layers[layer][degree].options):
            for (in_flight_bytes, fixed), (time_s, chosen) in best.items():
                key = (in_flight_bytes + option.in_flight_bytes, fixed + option.fixed_bytes)
                entry = (time_s + option.time_s, (*chosen, index))
                longer[key] = min(longer.get(key, entry), entry)
        best = longer
    fitting = [entry for (a, b), entry in best.items() if a * in_flight + b <= problem.capacity_bytes]
    return min(fitting)[1] if fitting else None
