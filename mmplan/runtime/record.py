"""Turns what every rank saw into one measurement."""

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

import mmplan
from mmplan.errors import RunError
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import TimedAction
from mmplan.runtime.groups import collapsed
from mmplan.runtime.measurement import ActionStatistics, Measurement, RankMeasurement, StepMeasurement, plan_hash
from mmplan.runtime.train import RankStep


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRun:
    """All steps of one rank and its probed transfers of the recorded step: (target rank, bytes) -> seconds."""

    steps: tuple[RankStep, ...]
    probed_s: Mapping[tuple[int, int], float]
    host: str
    host_cores: int


def fastest_step(ends_s: Sequence[Sequence[float]]) -> int:
    """The step to record, of ends by [rank][step]; the first one allocates and warms up, so any other is better."""
    step_times_s = [max(step) for step in zip(*ends_s, strict=True)]
    return min(range(len(step_times_s)), key=lambda step: (step == 0 and len(step_times_s) > 1, step_times_s[step]))


def measurement_of(
    plan: Plan, runs: Sequence[RankRun], recorded: int, *, device: str, backend: str, rehearsed: bool, time_scale: float
) -> Measurement:
    """Args: runs: by rank; recorded: the step whose actions are kept. Of ranks that share layers the first is kept."""
    hosts = [(run.host, run.host_cores) for run in runs]
    width = 1 if rehearsed else plan.width
    runs = [listed_run(runs[first : first + width]) for first in range(0, len(runs), width)]
    steps = tuple(step_measurement(index, [run.steps[index] for run in runs]) for index in range(len(runs[0].steps)))
    chosen = [run.steps[recorded] for run in runs]
    computes = [item for step in chosen for item in step.timeline if item.action.kind in ("F", "B", "I", "W")]
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
        steps=steps,
        recorded_step=recorded,
        pipeline_s=pipeline_s,
        bubble=1.0 - busy_s / (len(runs) * pipeline_s),
        ranks=tuple(_rank(rank, chosen, runs, pipeline_s) for rank in range(len(runs))),
        actions=tuple(entry for run in runs for entry in _statistics(run)),
        timeline=tuple(item for step in chosen for item in step.timeline),
    )


def listed_run(sharing: Sequence[RankRun]) -> RankRun:
    """The run of the first of the ranks that share a stage's layers, ranks counted without the others; they do the same
    at the same time. The peak of memory is that of the fullest.

    Raises:
        RunError: they sent or summed different numbers of bytes.
    """
    if len(sharing) == 1:
        return sharing[0]
    steps = []
    for same in zip(*(run.steps for run in sharing), strict=True):
        counts = {(s.activation_bytes, s.gradient_bytes, s.reduce_bytes, s.tensor_bytes) for s in same}
        if len(counts) > 1:
            first = same[0].program.rank
            told = " and ".join(str(count) for count in sorted(counts))
            raise RunError(f"ranks {first} to {first + len(same) - 1} share layers and sent {told} bytes")
        steps.append(_listed_step(same[0], len(same), max(s.peak_memory_bytes for s in same)))
    probed_s = {(peer // len(sharing), size): seconds for (peer, size), seconds in sharing[0].probed_s.items()}
    return replace(sharing[0], steps=tuple(steps), probed_s=probed_s)


def _listed_step(step: RankStep, width: int, peak_memory_bytes: int) -> RankStep:
    program = collapsed(step.program, width)
    timeline = tuple(replace(item, rank=program.rank) for item in step.timeline)
    return replace(step, program=program, timeline=timeline, peak_memory_bytes=peak_memory_bytes)


def step_measurement(index: int, ranks: Sequence[RankStep]) -> StepMeasurement:
    """One step over all ranks: the last end, and losses summed over the ranks that hold a part."""
    losses: dict[str, float] = {}
    for step in ranks:
        for module, loss in step.losses.items():
            losses[module] = losses.get(module, 0.0) + loss
    return StepMeasurement(
        index=index, step_time_s=max(item.end_s for step in ranks for item in step.timeline), losses=losses
    )


def require_numbers(step: StepMeasurement) -> None:
    """Raise RunError when a loss is infinite or no number: nothing is learned from there on."""
    for module, loss in step.losses.items():
        if not math.isfinite(loss):
            raise RunError(
                f"step {step.index}: the loss of '{module}' is {loss}; a smaller `optimizer.learning_rate` may help"
            )


def _rank(rank: int, steps: Sequence[RankStep], runs: Sequence[RankRun], pipeline_s: float) -> RankMeasurement:
    own = steps[rank]
    busy_s = sum(item.end_s - item.start_s for item in own.timeline if item.action.kind in ("F", "B", "I", "W"))
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
    """From the arrival of the last replica of the stage to the end on this rank."""
    ends_s = [item.end_s for item in _reduces(own)]
    if not ends_s:
        return 0.0
    same_stage = [step for step in steps if step.program.stage == own.program.stage]
    return max(ends_s) - max(item.start_s for step in same_stage for item in _reduces(step))


def _reduces(step: RankStep) -> list[TimedAction]:
    return [item for item in step.timeline if item.action.kind == "REDUCE"]


def _statistics(run: RankRun) -> list[ActionStatistics]:
    seconds: dict[str, list[float]] = {}
    for step in run.steps:
        for item in step.timeline:
            seconds.setdefault(item.action.kind, []).append(item.end_s - item.start_s)
    return [
        ActionStatistics(
            rank=run.steps[0].program.rank,
            kind=kind,
            count=len(values),
            total_s=sum(values),
            median_s=median(values),
            min_s=min(values),
            max_s=max(values),
        )
        for kind, values in seconds.items()
    ]
