"""Is a run whole, and does it say the same everywhere? A file that was cut or edited must not pass for a good run."""

import math
from collections.abc import Iterator
from pathlib import Path

from mmplan.errors import InputError
from mmplan.planner.program import Program
from mmplan.runtime.measurement import Measurement

_TOLERANCE = 1e-6  # of numbers that were computed from each other


def require_consistent(run: Measurement, path: Path) -> None:
    """Raise InputError, with both values, at the first place where the run in the file `path` contradicts itself."""
    for problem in _problems(run):
        raise InputError(f"the run contradicts itself: {problem}", file=path)


def require_computes(run: Measurement, program: Program) -> None:
    """Raise InputError unless the run's ranks and timeline are those of the program, every compute once."""
    if len(run.ranks) != len(program.ranks):
        raise InputError(f"the run has {len(run.ranks)} ranks, the plan {len(program.ranks)}")
    planned = [
        (index, action.stage, action.kind, action.microbatch)
        for index, rank in enumerate(program.ranks)
        for action in rank.actions
        if action.kind not in ("SEND", "RECV")
    ]
    done = [(item.rank, item.action.stage, item.action.kind, item.action.microbatch) for item in run.timeline]
    if sorted(done) != sorted(planned):
        different = sorted(set(planned) ^ set(done)) or sorted(done)
        rank, _, kind, microbatch = different[0]
        name = kind if microbatch < 0 else f"{kind}{microbatch}"
        raise InputError(
            f"the run's timeline has {len(done)} actions, the plan {len(planned)}; "
            f"the first that differs is {name} of rank {rank}"
        )


def _problems(run: Measurement) -> Iterator[str]:
    yield from _broken_numbers(run)
    if [rank.rank for rank in run.ranks] != list(range(len(run.ranks))):
        yield f"its ranks are {[rank.rank for rank in run.ranks]}, not 0, 1, 2 in order"
    if not 0 <= run.recorded_step < len(run.steps):
        yield f"step {run.recorded_step} is recorded, of {len(run.steps)} steps"
    strangers = [item.rank for item in run.timeline if not 0 <= item.rank < len(run.ranks)]
    if strangers:
        yield f"rank {strangers[0]} acts in its timeline, of {len(run.ranks)} ranks"
    yield from _wrong_sums(run)


def _broken_numbers(run: Measurement) -> Iterator[str]:
    """Numbers that no measurement gives."""
    for step in run.steps:
        if not all(math.isfinite(value) for value in (step.step_time_s, *step.losses.values())):
            yield f"time or loss of step {step.index} is no number"
    for rank in run.ranks:
        counts = (rank.activation_bytes, rank.gradient_bytes, rank.reduce_bytes, rank.peak_memory_bytes)
        times_s = (rank.busy_s, rank.transfer_s, rank.wait_s, rank.reduce_s)
        if min(*counts, *times_s) < 0 or not all(math.isfinite(value) for value in times_s):
            yield f"a number of rank {rank.rank} is negative or none"
    for item in run.timeline:
        if not 0 <= item.start_s <= item.end_s < math.inf:
            yield f"{item.action} of rank {item.rank} lasts from {item.start_s} s to {item.end_s} s"
    if len(run.asked_s) not in (0, len(run.timeline)):
        yield f"{len(run.asked_s)} times at which ranks asked for inputs, {len(run.timeline)} actions"
    for asked_s, item in zip(run.asked_s, run.timeline, strict=False):
        if not 0 <= asked_s <= item.start_s:
            yield f"{item.action} of rank {item.rank} starts at {item.start_s} s and is asked for at {asked_s} s"
    for transfer in run.transfers:
        ends = min(transfer.source, transfer.target), max(transfer.source, transfer.target)
        if ends[0] < 0 or ends[1] >= len(run.ranks) or transfer.bytes < 0 or not 0 <= transfer.seconds < math.inf:
            yield f"a transfer from rank {transfer.source} to {transfer.target} is none: {transfer}"
    if not (run.time_scale > 0 and run.processes_per_core > 0):
        yield f"time scale {run.time_scale} and {run.processes_per_core} processes per core must be positive"


def _wrong_sums(run: Measurement) -> Iterator[str]:
    """Totals that are not those of the timeline."""
    computes = [item for item in run.timeline if item.action.kind in ("F", "B", "I", "W")]
    if not computes:
        yield "its timeline has no computes"
        return
    busy_s = [0.0] * len(run.ranks)
    for item in computes:
        busy_s[item.rank] += item.end_s - item.start_s
    pipeline_s = max(item.end_s for item in computes) - min(item.start_s for item in computes)
    sums = [
        ("step time", run.step_time_s, max(item.end_s for item in run.timeline)),
        ("pipeline time", run.pipeline_s, pipeline_s),
        ("bubble", run.bubble, 1.0 - sum(busy_s) / (len(run.ranks) * pipeline_s)),
        *((f"busy time of rank {rank.rank}", rank.busy_s, busy_s[rank.rank]) for rank in run.ranks),
        *((f"bubble of rank {rank.rank}", rank.bubble, 1.0 - busy_s[rank.rank] / pipeline_s) for rank in run.ranks),
    ]
    for name, told, summed in sums:
        if not math.isclose(told, summed, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            yield f"{name} {told:.6g}, its timeline says {summed:.6g}"
