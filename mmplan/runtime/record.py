"""Turns what every rank saw into one measurement. Of all steps a rank keeps one, the fastest so far, and durations."""

import math
import platform
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

import mmplan
from mmplan.errors import RunError
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import TimedAction
from mmplan.planner.program import ActionKind, meeting
from mmplan.runtime.checkpoint.save import WrittenPart
from mmplan.runtime.finite import Unsound
from mmplan.runtime.health.seen import Seen
from mmplan.runtime.measurement import (
    ActionStatistics,
    Measurement,
    Moved,
    RankMeasurement,
    StepMeasurement,
    TransferMeasurement,
    plan_hash,
)
from mmplan.runtime.places import collapsed, listed_places
from mmplan.runtime.train import RankStep

_COMPUTES = ("F", "B", "I", "W")


class StepKeeper:
    """What one rank keeps of its steps: the recorded one, and the seconds of all actions by stage and kind.

    The first step taken allocates and warms up, so any other is better.
    """

    def __init__(self) -> None:
        self.recorded: RankStep | None = None
        self._best: tuple[bool, float] = (True, math.inf)
        self._seconds: dict[tuple[int, str], array[float]] = {}
        self.recorded_step = 0

    def add(self, step: int, done: RankStep, step_time_s: float) -> None:
        """Take a step that lasted `step_time_s` over all ranks, which therefore choose the same one."""
        for item in done.timeline:
            key = (item.action.stage, item.action.kind)
            self._seconds.setdefault(key, array("d")).append(item.end_s - item.start_s)
        ranking = (self.recorded is None, step_time_s)
        if self.recorded is None or ranking < self._best:
            self.recorded, self.recorded_step, self._best = done, step, ranking

    def statistics(self, rank: int) -> tuple[ActionStatistics, ...]:
        return tuple(
            ActionStatistics(
                rank=rank,
                stage=stage,
                kind=kind,
                count=len(values),
                total_s=sum(values),
                median_s=median(values),
                min_s=min(values),
                max_s=max(values),
            )
            for (stage, kind), values in self._seconds.items()
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRun:
    """The recorded step of one rank, statistics of all, and probed transfers: (target rank, bytes) -> seconds."""

    recorded: RankStep
    actions: tuple[ActionStatistics, ...]
    probed_s: Mapping[tuple[int, int], float]
    host: str
    host_cores: int


def measurement_of(
    plan: Plan,
    runs: Sequence[RankRun],
    steps: Sequence[StepMeasurement],
    recorded_step: int,
    *,
    device: str,
    backend: str,
    rehearsed: bool,
    time_scale: float,
    own_data: bool = False,
) -> Measurement:
    """Args: runs: by rank; of ranks that share layers the first is kept."""
    hosts = [(run.host, run.host_cores) for run in runs]
    runs = _listed_runs(plan, runs, rehearsed)
    chosen = [run.recorded for run in runs]
    computes = [item for step in chosen for item in step.timeline if item.action.kind in _COMPUTES]
    pipeline_s = max(item.end_s for item in computes) - min(item.start_s for item in computes)
    busy_s = sum(item.end_s - item.start_s for item in computes)
    return Measurement(
        plan_hash=plan_hash(plan),
        mmplan_version=mmplan.__version__,
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        device=device,
        backend=backend,
        hosts=tuple(sorted({host for host, _ in hosts})),
        processes_per_core=max(sum(other == host for other, _ in hosts) / cores for host, cores in hosts),
        rehearsed=rehearsed,
        time_scale=time_scale,
        own_data=own_data,
        steps=tuple(steps),
        recorded_step=recorded_step,
        pipeline_s=pipeline_s,
        bubble=1.0 - busy_s / (len(runs) * pipeline_s),
        ranks=tuple(_rank(rank, chosen, runs, pipeline_s) for rank in range(len(runs))),
        actions=tuple(replace(entry, rank=rank) for rank, run in enumerate(runs) for entry in run.actions),
        timeline=tuple(item for step in chosen for item in step.timeline),
        asked_s=tuple(asked_s for step in chosen for asked_s in step.asked_s),
        transfers=tuple(transfer for run in runs for transfer in _transfers(run)),
    )


def _transfers(run: RankRun) -> list[TransferMeasurement]:
    program = run.recorded.program
    counts = Counter((action.peer, action.bytes) for action in program.actions if action.kind == "SEND")
    return [
        TransferMeasurement(source=program.rank, target=peer, bytes=size, count=count, seconds=run.probed_s[peer, size])
        for (peer, size), count in counts.items()
    ]


def _listed_runs(plan: Plan, runs: Sequence[RankRun], rehearsed: bool) -> list[RankRun]:
    """Of each set of ranks that share layers one run."""
    if rehearsed:
        return list(runs)
    places, sets = listed_places(plan), list[list[RankRun]]()
    for rank, run in enumerate(runs):
        if rank not in places:
            continue
        if places[rank] == len(sets):
            sets.append([])
        sets[-1].append(run)
    return [listed_run(sharing, places, alike=not plan.meshes) for sharing in sets]


def listed_run(sharing: Sequence[RankRun], places: Mapping[int, int], *, alike: bool = True) -> RankRun:
    """The run of the first of the ranks that share a stage's layers, ranks by their `places` without the others; they
    do the same at the same time. The peak of memory is that of the fullest, and the first has the most tokens where
    these are dealt out.

    Args:
        alike: they send as much each, as they do where no mesh is wider than another.

    Raises:
        RunError: they sent or summed different numbers of bytes.
    """
    same = [run.recorded for run in sharing]
    counts = {(s.activation_bytes, s.gradient_bytes, s.reduce_bytes) for s in same}
    if len(counts) > 1 and alike:
        first = same[0].program.rank
        told = " and ".join(str(count) for count in sorted(counts))
        raise RunError(f"ranks {first} to {first + len(same) - 1} share layers and sent {told} bytes")
    step = _listed_step(same[0], places, max(s.peak_memory_bytes for s in same))
    probed_s = {(places[peer], size): seconds for (peer, size), seconds in sharing[0].probed_s.items()}
    return replace(sharing[0], recorded=step, probed_s=probed_s)


def _listed_step(step: RankStep, places: Mapping[int, int], peak_memory_bytes: int) -> RankStep:
    program = collapsed(step.program, places)
    timeline = tuple(replace(item, rank=program.rank) for item in step.timeline)
    return replace(step, program=program, timeline=timeline, peak_memory_bytes=peak_memory_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEnd:
    """What all ranks are told of a step of one rank; `written`: what it has written of a checkpoint meanwhile; `seen`:
    what its health shows in a sampled step."""

    end_s: float
    losses: Mapping[str, float]
    written: WrittenPart | None = None
    unsound: Unsound | None = None
    skipped: bool = False
    seen: Seen | None = None
    moved: Moved | None = None
    foreseen: Moved | None = None


def step_end(done: RankStep, written: WrittenPart | None = None, seen: Seen | None = None) -> StepEnd:
    return StepEnd(
        end_s=max(item.end_s for item in done.timeline),
        losses=done.losses,
        written=written,
        unsound=done.unsound,
        skipped=done.skipped,
        seen=seen,
        moved=done.moved,
        foreseen=done.foreseen,
    )


def step_measurement(index: int, ranks: Sequence[StepEnd], listed: Collection[int]) -> StepMeasurement:
    """One step over all ranks: the last end of those that are `listed`, and losses summed over the ranks that hold a
    part."""
    losses: dict[str, float] = {}
    for step in ranks:
        for module, loss in step.losses.items():
            losses[module] = losses.get(module, 0.0) + loss
    return StepMeasurement(
        index=index,
        step_time_s=max(ranks[rank].end_s for rank in listed),
        losses=losses,
        skipped=any(step.skipped for step in ranks),
        moved=_total([ranks[rank].moved for rank in listed]),
        foreseen=_total([ranks[rank].foreseen for rank in listed]),
    )


def _total(ranks: Sequence[Moved | None]) -> Moved | None:
    """Of all that tell."""
    told = [moved for moved in ranks if moved is not None]
    return sum(told[1:], told[0]) if told else None


def _rank(rank: int, steps: Sequence[RankStep], runs: Sequence[RankRun], pipeline_s: float) -> RankMeasurement:
    own = steps[rank]
    busy_s = sum(item.end_s - item.start_s for item in own.timeline if item.action.kind in _COMPUTES)
    transfer_s = 0.0
    for action in own.program.actions:
        if action.kind == "SEND":
            transfer_s += runs[rank].probed_s[action.peer, action.bytes]
        elif action.kind == "RECV":
            transfer_s += runs[action.peer].probed_s[own.program.rank, action.bytes]
    return RankMeasurement(
        rank=rank,
        stage=own.program.stage,
        replica=own.program.replica,
        busy_s=busy_s,
        bubble=1.0 - busy_s / pipeline_s,
        activation_bytes=own.activation_bytes,
        gradient_bytes=own.gradient_bytes,
        reduce_bytes=own.reduce_bytes,
        tensor_bytes=own.tensor_bytes,
        transfer_s=transfer_s,
        wait_s=own.wait_s,
        reduce_s=_reduce_s(own, steps),
        peak_memory_bytes=own.peak_memory_bytes,
    )


def _reduce_s(own: RankStep, steps: Sequence[RankStep]) -> float:
    """From the arrival of the last replica of the stage, or of the last stage of a tie, to the end on this rank."""
    tied_s = 0.0
    for item in _of_kind(own, "TIE"):
        met = meeting(own.program, item.action)
        there = (one for step in steps for one in _of_kind(step, "TIE") if meeting(step.program, one.action) == met)
        tied_s += max(0.0, item.end_s - max(one.start_s for one in there))
    ends_s = [item.end_s for item in _of_kind(own, "REDUCE")]
    if not ends_s:
        return tied_s
    same_stage = [step for step in steps if step.program.stage == own.program.stage]
    arrived_s = max(item.start_s for step in same_stage for item in _of_kind(step, "REDUCE"))
    # where layers reduce behind each backward, nobody waits at the end
    return tied_s + max(0.0, max(ends_s) - arrived_s)


def _of_kind(step: RankStep, kind: ActionKind) -> list[TimedAction]:
    return [item for item in step.timeline if item.action.kind == kind]
