"""Loads of a step's microbatches as every stage of a plan sees them.

A step's loads are listed by part (`Plan.parts` of them), of which each replica of any mesh has some in a row. Without
meshes of their own all replicas are alike and a part is a replica.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from mmplan.cost_models.load import Loads
from mmplan.cost_models.loads import mean_loads, sample_loads
from mmplan.planner.batch_factors import runs_with
from mmplan.planner.composition import plan_step
from mmplan.planner.mesh import Mesh, overlap_index, partners
from mmplan.planner.plan import Plan

T = TypeVar("T")
StepLoads = Sequence[Sequence[Loads]]  # [part or replica][microbatch]


def part_size(plan: Plan) -> int:
    """Samples of a part of a microbatch."""
    return plan.microbatch_size * plan.dp // plan.parts


def mean_step_loads(plan: Plan) -> tuple[tuple[Loads, ...], ...]:
    """Loads of a step in which all microbatches are mean: the parts of one unit (see `Plan.units`) stand for all."""
    mean = mean_loads(plan.scenario, part_size(plan))
    return ((mean,) * plan.microbatches,) * (plan.parts // plan.units)


def drawn_step_loads(plan: Plan, step: int) -> tuple[tuple[Loads, ...], ...]:
    """What the stages run in optimizer step `step`, [part][microbatch]: the samples that it draws from the data;
    modules a step ahead run those of the next step."""
    loads = _loads_of_data(plan, step)
    if not plan.prefetch:
        return loads
    rows = zip(loads, _loads_of_data(plan, step + 1), strict=True)
    return tuple(tuple(_with_next(plan, *pair) for pair in zip(now, later, strict=True)) for now, later in rows)


def _loads_of_data(plan: Plan, step: int) -> tuple[tuple[Loads, ...], ...]:
    drawn = split_samples(plan, plan_step(plan, step).samples)
    return tuple(tuple(sample_loads(plan.scenario, samples) for samples in part) for part in drawn)


def _with_next(plan: Plan, now: Loads, later: Loads) -> Loads:
    """Of modules a step ahead what the next step has."""
    sources = {name: later if name in plan.prefetch else now for name in (*now, *later)}
    return {name: loads[name] for name, loads in sources.items() if name in loads}


def split_samples(plan: Plan, samples: Sequence[Sequence[tuple[T, ...]]]) -> Sequence[Sequence[tuple[T, ...]]]:
    """Samples, or their indices, by replica of the plan's own mesh, [replica][microbatch], as those by part."""
    each = plan.parts // plan.dp
    if each == 1:
        return samples
    size = plan.microbatch_size // each
    return [
        [group[part * size : (part + 1) * size] for group in replica] for replica in samples for part in range(each)
    ]


class StageLoads:
    """Loads of a step by stage and replica; those of one part for all where no stage has a mesh of its own.

    Args:
        loads: [part][microbatch], those of one unit when they stand for all.

    Raises:
        ValueError: `loads` has another shape than the plan.
    """

    def __init__(self, plan: Plan, loads: StepLoads) -> None:
        if len(loads) not in (plan.parts // plan.units, plan.parts) or any(len(r) != plan.microbatches for r in loads):
            shape, what = (
                f"{len(loads)} x {sorted({len(row) for row in loads})}",
                "parts" if plan.meshes else "replicas",
            )
            raise ValueError(f"loads are {shape}, the plan has {plan.parts} {what} x {plan.microbatches} microbatches")
        self._plan, self._loads = plan, loads
        stages = range(len(plan.stages))
        self._dps = tuple(plan.mesh(stage).dp for stage in stages)
        self._factors = tuple(plan.layout(stage).batch_factor for stage in stages)
        self._known: dict[tuple[int, ...], Loads] = {}
        self._together: dict[tuple[int, ...], Loads] = {}
        self._of_dps: dict[tuple[int, int], StepLoads] = {(plan.parts, plan.parts): loads}

    @property
    def units(self) -> int:
        """Units that are listed: one, or all."""
        return len(self._loads) * self._plan.units // self._plan.parts

    def of_replicas(self, dp: int) -> StepLoads:
        """[replica][microbatch] of a mesh with so many replicas; equal microbatches are the same object."""
        return self.shared(dp, dp)

    def shared(self, dp: int, other: int) -> StepLoads:
        """[overlap][microbatch] of what replicas of two meshes have in common, in the order of samples."""
        key = (min(dp, other), max(dp, other))
        if key not in self._of_dps:
            ends = {end for each in key for end in range(0, len(self._loads) + 1, self._plan.parts // each)}
            self._of_dps[key] = [
                [self._joined(parts) for parts in zip(*self._loads[first:end], strict=True)]
                for first, end in pairwise(sorted(ends))
            ]
        return self._of_dps[key]

    def of_overlaps(self, own: Mesh, replica: int, other: Mesh) -> StepLoads:
        """[partner][microbatch] of what each replica of another mesh shares with one of this."""
        first = overlap_index(replica, own.dp, partners(replica, own, other)[0], other.dp)
        return self.shared(own.dp, other.dp)[first : first + len(partners(replica, own, other))]

    def of_stage(self, stage: int) -> StepLoads:
        """[replica][microbatch] of a stage."""
        return self.of_replicas(self._dps[stage])

    def of_compute(self, stage: int, replica: int, kind: str, microbatch: int) -> Loads:
        """What a forward or backward of the stage runs: modules that run several microbatches at once have the load of
        all of these, or none."""
        plan, row = self._plan, self.of_stage(stage)[replica]
        factor = self._factors[stage]
        if factor == 1:
            return row[microbatch]
        first, runs = microbatch // factor * factor, runs_with(kind, microbatch, factor)
        key = (id(row[microbatch]), *(map(id, row[first : first + factor]) if runs else ()))
        if key not in self._together:
            together = self._joined(tuple(row[first : first + factor])) if runs else {}
            alone = {module: load for module, load in row[microbatch].items() if module not in plan.together}
            self._together[key] = alone | {name: together[name] for name in plan.together if runs}
        return self._together[key]

    def _joined(self, parts: tuple[Loads, ...]) -> Loads:
        if len(parts) == 1:
            return parts[0]
        key = tuple(map(id, parts))  # of objects that `self._loads` holds
        if key not in self._known:
            alike = all(part is parts[0] for part in parts)
            self._known[key] = {
                module: load.scaled(len(parts)) if alike else sum((p[module] for p in parts[1:]), load)
                for module, load in parts[0].items()
            }
        return self._known[key]
