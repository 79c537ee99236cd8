"""Several ranks of one job side by side: who waits in collectives for whom, and how far their clocks are apart.

The n-th call of a collective in a group is the same on all its ranks. It moves data from the moment the last rank
arrives, so the shortest of its durations is the transfer and the rest of each rank's is waiting: no clock is compared
for that.
"""

from dataclasses import dataclass

import numpy as np

from mmplan.cost_models.traces.intervals import Ints
from mmplan.cost_models.traces.kernel_classes import CLASS_INDEX, COMMUNICATION
from mmplan.cost_models.traces.record import RankWait
from mmplan.cost_models.traces.recording import MARK, Recording
from mmplan.units import format_seconds, seconds_of_nanoseconds

_SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_CLOCKS_DIFFER_S = 1e-3
_LEAST_WAIT = 0.05  # of the time in collectives


@dataclass(frozen=True, slots=True)
class _Calls:
    """Of one collective and size in one group, in the order of the device."""

    start_ns: Ints
    end_ns: Ints


def rank_waits(recordings: tuple[Recording, ...]) -> tuple[tuple[RankWait, ...], list[str]]:
    """What each rank waited, and what is to be said about it; nothing for a single file."""
    if len(recordings) < 2:
        return (), []
    calls = [_calls(recording) for recording in recordings]
    shared = [key for key in calls[0] if all(key in other for other in calls)]
    matched = [key for key in shared if len({len(other[key].start_ns) for other in calls}) == 1]
    notes = []
    unmatched = len({key for other in calls for key in other}) - len(matched)
    if unmatched:
        notes.append(f"{unmatched} kinds of collectives do not occur equally often in all files and are not compared")
    if not matched:
        return (), notes
    lengths = [np.concatenate([other[key].end_ns - other[key].start_ns for key in matched]) for other in calls]
    ends = [np.concatenate([other[key].end_ns for key in matched]) for other in calls]
    fastest = np.minimum.reduce(lengths)
    found = []
    for recording, own, own_ends in zip(recordings, lengths, ends, strict=True):
        offset_ns = float(np.median(own_ends - ends[0]))
        found.append(
            RankWait(
                rank=recording.rank,
                file=recording.file,
                wait_s=seconds_of_nanoseconds(int((own - fastest).sum())),
                collectives=len(own),
                clock_offset_s=seconds_of_nanoseconds(offset_ns),
            )
        )
    total_s = seconds_of_nanoseconds(max(int(own.sum()) for own in lengths))
    notes += _told(recordings, found, total_s)
    return tuple(found), notes


def _told(recordings: tuple[Recording, ...], waits: list[RankWait], total_s: float) -> list[str]:
    notes = []
    order = sorted(range(len(waits)), key=lambda i: waits[i].wait_s)
    first, last = order[0], order[-1]
    if waits[last].wait_s - waits[first].wait_s > _LEAST_WAIT * total_s:
        notes.append(
            f"{recordings[first].label} is the straggler: it waits {format_seconds(waits[first].wait_s)} in "
            f"collectives, {recordings[last].label} {format_seconds(waits[last].wait_s)}"
        )
    apart = [i for i, wait in enumerate(waits) if abs(wait.clock_offset_s) > _CLOCKS_DIFFER_S]
    if apart:
        worst = max(apart, key=lambda i: abs(waits[i].clock_offset_s))
        notes.append(
            f"clocks differ: that of {recordings[worst].label} is {format_seconds(waits[worst].clock_offset_s)} off "
            f"that of {recordings[0].label} by the ends of the same collectives; begins are not compared across files"
        )
    return notes


def _calls(recording: Recording) -> dict[tuple[str, int | None, str], _Calls]:
    work = recording.work
    found = {}
    of_key: dict[tuple[str, int | None, str], list[int]] = {}
    for index, message in enumerate(recording.messages):
        if message.collective in _SYNCHRONISING:
            of_key.setdefault((message.collective, message.bytes, message.group), []).append(index)
    host = recording.host
    for key, indices in of_key.items():
        if recording.on_cpu:  # gloo's own threads: their ranges are the communication
            rows = np.flatnonzero(np.isin(host.message, indices) & (host.kind == MARK))
            rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
            start_ns, end_ns = host.start_ns[rows], host.end_ns[rows]
        else:
            rows = np.flatnonzero(np.isin(work.message, indices) & (work.kind == CLASS_INDEX[COMMUNICATION]))
            start_ns, end_ns = work.start_ns[rows], work.end_ns[rows]
        if len(rows):
            found[key] = _Calls(start_ns, end_ns)
    return found
