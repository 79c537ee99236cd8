"""Waits of at least 5 ms with their cause, and dense clusters of short waits for locks (X9 of a training job's
health).
"""

import re
from collections.abc import Iterator

import numpy as np

from mmplan.cost_models.traces.host_activity import HostActivity
from mmplan.cost_models.traces.intervals import Ints, Spans, common, covered_ns, without
from mmplan.cost_models.traces.kernel_classes import CLASS_INDEX, COMMUNICATION, collective, short_name
from mmplan.cost_models.traces.record import Gap, LockCluster
from mmplan.cost_models.traces.recording import CALL, Host, Recording
from mmplan.scenario.document import counted
from mmplan.units import format_bytes, format_seconds, seconds_of_nanoseconds

LEAST_GAP_NS = 5_000_000
MOST_GAPS = 100  # the longest ones are told

_MILLISECOND_NS = 1_000_000
LEAST_WAITS_PER_MS = 10
_SHORT_NS = 500_000  # a longer wait is a gap, not one of a cluster
_LOCKS = re.compile(
    r"^(__)?(pthread_(mutex_(lock|timedlock|trylock)|rwlock|spin|cond_(timed)?wait|cond_signal)|sem_(timed|clock)?wait|futex)|"
    r"\bGIL\b|take_gil|acquire of _thread\.|lock\.acquire|\bMutex|std::mutex|SpinLock",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r" (object )?at 0x[0-9a-fA-F]+|0x[0-9a-fA-F]+")
_MOST_KINDS = 200
_GIL = re.compile(r"\bGIL\b|take_gil|acquire of _thread|lock\.acquire", re.IGNORECASE)
_DRIVER = re.compile(r"^(cuda|cu|hip|nccl)[A-Z]")


def gaps_of(
    recording: Recording,
    activity: HostActivity,
    device: int,
    busy: Spans,
    compute: Spans,
    message: Spans,
    window: Spans,
) -> tuple[list[Gap], int]:
    """The longest waits of a device inside `window`, and how many there are in all.

    Args:
        busy: anything runs on the device; `compute`: anything but communication; `message`: communication.
    """
    idle, alone = _long(without(window, busy)), _long(common(without(message, compute), window))
    found: list[tuple[int, Gap]] = []
    for begin_ns, end_ns in _longest(idle):
        seen = activity.during(begin_ns, end_ns)
        found.append((begin_ns, _gap("idle", device, begin_ns, end_ns, window, seen.cause, seen.host)))
    for begin_ns, end_ns in _longest(alone):
        cause = _message_cause(recording, device, begin_ns, end_ns)
        seen = activity.during(begin_ns, end_ns)
        found.append((begin_ns, _gap("communication only", device, begin_ns, end_ns, window, cause, seen.host)))
    return [gap for _, gap in sorted(found, key=lambda item: item[0])], len(idle) + len(alone)


def _long(spans: Spans) -> Spans:
    some = spans.end_ns - spans.start_ns >= LEAST_GAP_NS
    return Spans(start_ns=spans.start_ns[some], end_ns=spans.end_ns[some])


def _longest(spans: Spans) -> Iterator[tuple[int, int]]:
    order = np.argsort(spans.start_ns - spans.end_ns, kind="stable")[:MOST_GAPS]
    yield from zip(spans.start_ns[order].tolist(), spans.end_ns[order].tolist(), strict=True)


def _gap(kind: str, device: int, begin_ns: int, end_ns: int, window: Spans, cause: str, host: str) -> Gap:
    return Gap(
        kind="idle" if kind == "idle" else "communication only",
        device=device,
        begin_s=seconds_of_nanoseconds(begin_ns - int(window.start_ns[0])),
        length_s=seconds_of_nanoseconds(end_ns - begin_ns),
        cause=cause,
        host=host,
    )


def _message_cause(recording: Recording, device: int, begin_ns: int, end_ns: int) -> str:
    """The collective that fills the wait, beside the fastest call of its size: what is beyond that is waiting."""
    work = recording.work
    rows = np.flatnonzero(
        (work.kind == CLASS_INDEX[COMMUNICATION]) & (work.start_ns < end_ns) & (work.end_ns > begin_ns)
    )
    devices = np.array([stream.device for stream in recording.streams])[work.stream[rows]]
    rows = rows[devices == device]
    row = int(rows[(work.end_ns - work.start_ns)[rows].argmax()])
    name = recording.names[int(work.name[row])]
    length_ns = int(work.end_ns[row] - work.start_ns[row])
    message = recording.messages[int(work.message[row])] if work.message[row] >= 0 else None
    what = message.collective if message else collective(name)
    size = f" of {format_bytes(message.bytes)}" if message and message.bytes is not None else ""
    if not size:
        return f"{what} alone on the device: transfer, or waiting for other ranks (the trace has no message sizes)"
    same = work.message == work.message[row]
    fastest_ns = int((work.end_ns - work.start_ns)[same].min())
    if int(same.sum()) < 2 or fastest_ns * 2 > length_ns:
        return f"{what}{size} alone on the device: transfer, or waiting for other ranks"
    took, fast = (format_seconds(seconds_of_nanoseconds(value)) for value in (length_ns, fastest_ns))
    return f"waiting for another rank in {what}{size}: {took}, the fastest call of this size took {fast}"


def lock_clusters(host: Host, names: tuple[str, ...], window: Spans, begin_ns: int) -> list[LockCluster]:
    """Stretches in which each millisecond holds at least ten short waits of one name, over all threads."""
    locks = np.array([_LOCKS.search(name[:300]) is not None for name in names], bool)
    if len(host) == 0 or not locks.any():
        return []
    # locks of one kind are one name: `<... _thread.lock object at 0x7f12>`
    kinds: dict[str, list[int]] = {}
    for name in np.flatnonzero(locks).tolist():
        kinds.setdefault(_ADDRESS.sub("", names[name]), []).append(name)
    found = []
    for same in list(kinds.values())[:_MOST_KINDS]:
        rows = np.flatnonzero(np.isin(host.name, same) & (host.end_ns - host.start_ns < _SHORT_NS))
        rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
        for first, last in _dense(host.start_ns[rows]):
            found.append(_cluster(host, names, same[0], rows[first:last], begin_ns))
    return sorted(found, key=lambda cluster: -cluster.waits)[:MOST_GAPS]


def _dense(start_ns: Ints) -> list[tuple[int, int]]:
    """[first, last) of runs in which each wait is one of ten within a millisecond."""
    count = len(start_ns)
    if count < LEAST_WAITS_PER_MS:
        return []
    tenth = np.flatnonzero(
        start_ns[LEAST_WAITS_PER_MS - 1 :] - start_ns[: count - LEAST_WAITS_PER_MS + 1] <= _MILLISECOND_NS
    )
    runs: list[tuple[int, int]] = []
    for first in tenth.tolist():
        near = runs and start_ns[min(first, runs[-1][1])] - start_ns[runs[-1][1] - 1] <= _MILLISECOND_NS
        if near and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], first + LEAST_WAITS_PER_MS)
        else:
            runs.append((first, first + LEAST_WAITS_PER_MS))
    return runs


def _cluster(host: Host, names: tuple[str, ...], name: int, rows: Ints, begin_ns: int) -> LockCluster:
    first_ns, last_ns = int(host.start_ns[rows].min()), int(host.end_ns[rows].max())
    length_ns = max(last_ns - first_ns, 1)
    threads = len(np.unique(host.thread[rows]))
    return LockCluster(
        name=short_name(_ADDRESS.sub("", names[name])),
        begin_s=seconds_of_nanoseconds(first_ns - begin_ns),
        length_s=seconds_of_nanoseconds(length_ns),
        waits=len(rows),
        per_ms=len(rows) / length_ns * _MILLISECOND_NS,
        threads=threads,
        cause=_lock_cause(host, names, name, rows, threads, first_ns, last_ns),
    )


def _lock_cause(
    host: Host, names: tuple[str, ...], name: int, rows: Ints, threads: int, first_ns: int, last_ns: int
) -> str:
    own = names[name]
    if _GIL.search(own):
        return f"the interpreter lock, taken in turns by {threads} threads" if threads > 1 else "the interpreter lock"
    calls = np.flatnonzero((host.kind == CALL) & (host.start_ns < last_ns) & (host.end_ns > first_ns))
    calls = calls[np.isin(host.thread[calls], np.unique(host.thread[rows]))]
    drivers = [int(row) for row in calls if _DRIVER.search(names[int(host.name[row])])][:10_000]
    inside = 0
    if drivers:
        order = np.array(drivers)
        spans_begin, spans_end = host.start_ns[order], host.end_ns[order]
        reach = np.maximum.accumulate(spans_end[np.argsort(spans_begin, kind="stable")])
        at = np.searchsorted(np.sort(spans_begin), host.start_ns[rows], side="right") - 1
        inside = int(((at >= 0) & (reach[np.maximum(at, 0)] >= host.end_ns[rows])).sum())
    if inside * 2 >= len(rows):
        longest = max(drivers, key=lambda row: int(host.end_ns[row] - host.start_ns[row]))
        return (
            f"the driver's own lock inside {names[int(host.name[longest])]}, by {counted(threads, 'thread')} at a time"
        )
    if own.startswith("sem_"):
        return f"a queue or semaphore between {counted(threads, 'thread')} (Python locks wait by semaphores on Linux)"
    if "cond" in own:
        if threads == 1:
            return "one thread that waits to be woken (a queue, or the interpreter lock handed over)"
        return f"{threads} threads that wake each other (a queue, or the interpreter lock handed over)"
    return (
        f"a mutex that {threads} threads contend for"
        if threads > 1
        else "a mutex that one thread takes again and again"
    )


def covered_seconds(spans: Spans, window: Spans) -> float:
    """Seconds of `spans` inside `window`."""
    return seconds_of_nanoseconds(int(covered_ns(spans, window.start_ns, window.end_ns).sum()))
