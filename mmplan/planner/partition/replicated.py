"""The pipeline of replicated stages with the least seconds per sample, by a decision per trial value.

For a trial value, `fewest[i, s]` is the fewest devices that run what is outside downset i with data degrees of sum s or
less. Devices and degrees both want the smallest data degree that a stage may have, so only that one is tried. A value
for which the devices do not suffice is a proven bound.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmplan.errors import InfeasibleError
from mmplan.planner.partition.replicated_problem import ReplicatedProblem, ReplicatedStage, seconds_per_sample
from mmplan.planner.partition.segments import Segments, chosen_options, list_segments
from mmplan.planner.stopping import Deadline
from mmplan.planner.upsets import IntArray

IntTable = npt.NDArray[np.int32]

TOLERANCE = 1e-9  # proven distance of the answer to the optimum, relative
FIRST_SLACK = 0.01  # of the first trial over the bound from sums; doubled each time no pipeline is found
NEVER = np.int32(1 << 29)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatedResult:
    """The best pipeline, its seconds per sample, and what no pipeline is below."""

    stages: tuple[ReplicatedStage, ...]
    objective_s: float
    bound_s: float
    trials: int
    downsets: int

    @property
    def optimal(self) -> bool:
        return self.objective_s * (1 - 2 * TOLERANCE) <= self.bound_s


def solve_replicated(problem: ReplicatedProblem, deadline: Deadline) -> ReplicatedResult:
    """The best pipeline within the deadline, and a proven bound.

    Raises:
        InfeasibleError: proved: no pipeline fits the memory.
        NoPlanFoundError: the layers have too many downsets, or choices of recomputation, to search.
    """
    segments = list_segments(problem)
    stages = _pipeline_within(problem, segments, math.inf)
    if stages is None:
        raise InfeasibleError(f"no pipeline fits {problem.capacity_bytes:.0f} bytes on {problem.devices} devices")
    low_s, high_s = _least_s(problem), seconds_per_sample(problem, stages)
    slack, trials, in_middle = FIRST_SLACK, 1, True
    while low_s < high_s * (1 - TOLERANCE) and not deadline.passed():
        middle_s = min(low_s * (1 + slack) or math.inf, (low_s + high_s) / 2)
        trial_s = middle_s if in_middle else high_s * (1 - TOLERANCE)
        found = _pipeline_within(problem, segments, trial_s)
        trials += 1
        if found is None:
            low_s, slack, in_middle = trial_s, 2 * slack, True
        else:  # a new pipeline is often the best: the next trial is just below it, once
            stages, high_s, in_middle = found, seconds_per_sample(problem, found), not in_middle
    return ReplicatedResult(
        stages=stages, objective_s=high_s, bound_s=min(low_s, high_s), trials=trials, downsets=segments.downsets
    )


def _least_s(problem: ReplicatedProblem) -> float:
    """A bound from sums: each layer where it takes the least device seconds, spread over all devices."""
    least = [min(t * min(o.time_s for o in at.options) for t, at in layer.items()) for layer in problem.layers]
    return sum(least) / problem.devices


def _pipeline_within(
    problem: ReplicatedProblem, segments: Segments, trial_s: float
) -> tuple[ReplicatedStage, ...] | None:
    """A pipeline whose stages all take at most `trial_s`, or None: there is none."""
    k = problem.devices
    reach = _reach(problem, segments, trial_s)
    fewest = np.full((segments.downsets, k + 1), NEVER, dtype=np.int32)
    fewest[-1] = 0
    starts = np.searchsorted(segments.before, np.arange(segments.downsets + 1))
    for before in range(segments.downsets - 2, -1, -1):
        rows = np.arange(starts[before], starts[before + 1])
        rows = rows[reach[rows, -1] > 0]
        if len(rows):
            needed = _needed(problem, segments, reach, fewest, rows)[1].min(axis=0)
            fewest[before] = np.minimum.accumulate(needed)
    return None if fewest[0, k] > k else _trace(problem, segments, reach, fewest)


def _reach(problem: ReplicatedProblem, segments: Segments, trial_s: float) -> IntTable:
    """[row, data degree] the largest sum of data degrees with which the stage, at this degree or a smaller one, keeps
    the trial value; it grows along the row.
    """
    reach = np.zeros((len(segments.before), len(problem.data_degrees)), dtype=np.int32)
    for column, d in enumerate(problem.data_degrees):
        room_s = (trial_s - segments.resync_s * (d - 1) / d) * d * (1 + 1e-12) - segments.transfer_s
        steps = (segments.time_s <= room_s[:, None]).sum(axis=1)
        most = np.where(steps > 0, segments.most[np.arange(len(steps)), steps - 1], 0)
        reach[:, column] = np.where(d * segments.tensor_degree <= problem.devices, d * most, 0)
    return np.maximum.accumulate(reach, axis=1)


def _needed(
    problem: ReplicatedProblem, segments: Segments, reach: IntTable, fewest: IntTable, rows: IntArray
) -> tuple[IntTable, IntTable]:
    """[row, s] the least data degree of a first stage when degrees sum to s or less, and the fewest devices then."""
    total = np.arange(fewest.shape[1], dtype=np.int32)
    place = np.zeros((len(rows), len(total)), dtype=np.int16)
    for column in range(reach.shape[1]):
        place += reach[rows, column, None] < total
    degree = np.array([*problem.data_degrees, NEVER], dtype=np.int32)[place]
    rest = total - degree
    width = segments.tensor_degree[rows, None].astype(np.int32)
    needed = fewest[segments.after[rows, None], np.maximum(rest, 0)] + np.where(rest >= 0, degree * width, NEVER)
    return degree, np.minimum(needed, NEVER)


def _trace(
    problem: ReplicatedProblem, segments: Segments, reach: IntTable, fewest: IntTable
) -> tuple[ReplicatedStage, ...]:
    """The stages behind `fewest[0, devices]`, each with its fastest options."""
    found: list[tuple[tuple[int, ...], int, int]] = []
    before, total = 0, problem.devices
    while before < segments.downsets - 1:
        total = int(np.searchsorted(-fewest[before], -fewest[before, total]))
        rows = np.flatnonzero(segments.before == before)
        degree, needed = _needed(problem, segments, reach, fewest, rows)
        row = int(np.argmin(needed[:, total]))
        after = int(segments.after[rows[row]])
        inside = np.flatnonzero(segments.member[after] & ~segments.member[before])
        found.append((tuple(inside.tolist()), int(segments.tensor_degree[rows[row]]), int(degree[row, total])))
        before, total = after, total - int(degree[row, total])
    stages = []
    for index, (layers, tensor_degree, data_degree) in enumerate(found):
        in_flight = -(-sum(later[2] for later in found[index:]) // data_degree)
        options = chosen_options(problem, tensor_degree, layers, in_flight)
        assert options is not None
        stages.append(
            ReplicatedStage(layers=layers, options=options, tensor_degree=tensor_degree, data_degree=data_degree)
        )
    return tuple(stages)
