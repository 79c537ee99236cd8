"""From a recording to its measured seconds: classes, communication hidden and exposed, streams, operators, findings."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mmplan.cost_models.traces.attribution import BACKWARD, FORWARD, OTHER, PHASES, Attribution
from mmplan.cost_models.traces.findings import covered_seconds, gaps_of, lock_clusters
from mmplan.cost_models.traces.host_activity import HostActivity
from mmplan.cost_models.traces.intervals import Flags, Ints, Spans, common, empty, union, without
from mmplan.cost_models.traces.kernel_classes import CLASS_INDEX, CLASS_NAMES, COMMUNICATION, MEMCPY, MEMSET, short_name
from mmplan.cost_models.traces.record import (
    ClassTime,
    CopyTime,
    DeviceTime,
    Gap,
    MessageTime,
    OperatorTime,
    PartTime,
    RankTrace,
    StreamTime,
)
from mmplan.cost_models.traces.recording import CALL, MARK, OPERATOR, SYSTEM, Recording
from mmplan.cost_models.traces.steps import Steps
from mmplan.units import seconds_of_nanoseconds

MOST_ROWS = 40  # operators, kernels, messages that are told, by time


def rank_trace(recording: Recording, attribution: Attribution, steps: Steps) -> tuple[RankTrace, int]:
    """The numbers of one process, and how many waits of at least 5 ms it has."""
    window = window_of(recording, steps)
    work = recording.work
    inside = (work.end_ns > _first(window)) & (work.start_ns < _last(window))
    devices = np.array([stream.device for stream in recording.streams], np.int64)
    device_of = devices[work.stream] if len(work) else np.zeros(0, np.int64)
    times, gaps, waits = [], list[Gap](), 0
    activity = HostActivity(recording, attribution)
    for device in sorted(set(device_of[inside].tolist())):
        mine = inside & (device_of == device)
        parts = _device_parts(recording, mine)
        times.append(_device_time(device, parts, window))
        busy, compute, message = parts
        found, count = gaps_of(recording, activity, device, busy, compute, message, window)
        gaps, waits = gaps + found, waits + count
    trace = RankTrace(
        file=recording.file,
        source=recording.source,
        rank=recording.rank,
        world_size=recording.world_size,
        device=recording.device_name,
        marked_by=steps.marked_by,
        step_s=tuple(seconds_of_nanoseconds(step.end_ns - step.begin_ns) for step in steps.steps),
        window_s=window.seconds,
        devices=tuple(times),
        classes=_classes(recording, inside, device_of, window, work.kind, CLASS_NAMES),
        phases=_phases(recording, attribution, inside, device_of, window),
        parts=_parts(recording, attribution, inside),
        operators=_operators(recording, attribution, inside),
        kernels=_kernels(recording, inside),
        host_ranges=_host_rows(recording, window, (MARK,)),
        calls=_host_rows(recording, window, (CALL, SYSTEM)),
        messages=_messages(recording, inside),
        copies=_copies(recording, inside),
        streams=_streams(recording, inside, window),
        gaps=tuple(gaps),
        locks=tuple(lock_clusters(recording.host, recording.names, window, _first(window))),
    )
    return trace, waits


def shortened(trace: RankTrace, rows: int) -> RankTrace:
    """With at most so many rows in each table, for the record of many ranks."""
    return replace(
        trace,
        operators=trace.operators[:rows],
        kernels=trace.kernels[:rows],
        host_ranges=trace.host_ranges[:rows],
        calls=trace.calls[:rows],
        messages=trace.messages[:rows],
        copies=trace.copies[:rows],
        streams=trace.streams[:rows],
        gaps=tuple(sorted(sorted(trace.gaps, key=lambda gap: -gap.length_s)[:rows], key=lambda gap: gap.begin_s)),
        locks=trace.locks[:rows],
    )


def window_of(recording: Recording, steps: Steps) -> Spans:
    """The steps; without them all device work, or all that the host did."""
    if steps.steps:
        begins = [step.begin_ns for step in steps.steps]
        ends = [step.end_ns for step in steps.steps[:-1]] + [max(steps.tail_ns, steps.steps[-1].end_ns)]
        return union(np.array(begins), np.array(ends))
    rows = recording.work if len(recording.work) else recording.host
    if len(rows) == 0:
        return empty()
    return union(np.array([rows.start_ns.min()]), np.array([rows.end_ns.max()]))


def _first(window: Spans) -> int:
    return int(window.start_ns[0]) if len(window) else 0


def _last(window: Spans) -> int:
    return int(window.end_ns[-1]) if len(window) else 0


def _device_parts(recording: Recording, mine: Flags) -> tuple[Spans, Spans, Spans]:
    """(anything, computation with copies inside the device's memory left out, communication) of these rows."""
    work = recording.work
    message = mine & (work.kind == CLASS_INDEX[COMMUNICATION])
    copy = mine & np.isin(work.kind, (CLASS_INDEX[MEMCPY], CLASS_INDEX[MEMSET]))
    compute = mine & ~message & ~copy
    everything, computing, sending = (
        union(work.start_ns[rows], work.end_ns[rows]) for rows in (mine, compute, message)
    )
    return everything, computing, sending


def _device_time(device: int, parts: tuple[Spans, Spans, Spans], window: Spans) -> DeviceTime:
    busy, compute, message = (common(part, window) for part in parts)
    exposed = without(message, compute)
    return DeviceTime(
        device=device,
        compute_s=compute.seconds,
        exposed_communication_s=exposed.seconds,
        exposed_copy_s=max(0.0, busy.seconds - compute.seconds - exposed.seconds),
        idle_s=max(0.0, window.seconds - busy.seconds),
        communication_s=message.seconds,
    )


def _classes(
    recording: Recording, inside: Flags, device_of: Ints, window: Spans, column: Ints, names: tuple[str, ...]
) -> tuple[ClassTime, ...]:
    """By value of a column of work: moments in which any of its rows runs, per device and added."""
    work, found = recording.work, []
    for value, name in enumerate(names):
        rows = inside & (column == value)
        if not rows.any():
            continue
        seconds = sum(
            covered_seconds(union(work.start_ns[rows & (device_of == d)], work.end_ns[rows & (device_of == d)]), window)
            for d in set(device_of[rows].tolist())
        )
        found.append(ClassTime(name=name, seconds=seconds, count=int(rows.sum())))
    return tuple(sorted(found, key=lambda item: -item.seconds))


def _phases(
    recording: Recording, attribution: Attribution, inside: Flags, device_of: Ints, window: Spans
) -> tuple[ClassTime, ...]:
    """Nothing where no kernel could be joined to an operator with a phase; on the CPU, operators' own seconds."""
    if recording.on_cpu:
        rows, own_ns = own_times(recording, attribution)
        phase = attribution.phase[rows]
        sums = [
            ClassTime(
                name=name,
                seconds=seconds_of_nanoseconds(int(own_ns[phase == index].sum())),
                count=int((phase == index).sum()),
            )
            for index, name in enumerate(PHASES)
        ]
        return tuple(sorted((item for item in sums if item.count), key=lambda item: -item.seconds))
    phase = attribution.of_work(attribution.phase, 0)
    if not phase.any():
        return ()
    return _classes(recording, inside, device_of, window, phase, PHASES)


def _parts(recording: Recording, attribution: Attribution, inside: Flags) -> tuple[PartTime, ...]:
    """Kernels but for communication; on the CPU, operators' own seconds."""
    work = recording.work
    if recording.on_cpu:
        rows, lengths = own_times(recording, attribution)
        part, phase, counted = attribution.part[rows], attribution.phase[rows], np.ones(len(rows), bool)
    else:
        part, phase = attribution.of_work(attribution.part, -1), attribution.of_work(attribution.phase, 0)
        lengths, counted = work.end_ns - work.start_ns, inside & (work.kind != CLASS_INDEX[COMMUNICATION])
    found = []
    for index, name in enumerate(attribution.parts):
        own = counted & (part == index)
        ahead = own & ((phase == FORWARD) | (phase == OTHER))
        found.append(
            PartTime(
                name=name,
                calls=attribution.calls.get(name, 0),
                forward_s=seconds_of_nanoseconds(int(lengths[ahead].sum())),
                backward_s=seconds_of_nanoseconds(int(lengths[own & (phase == BACKWARD)].sum())),
            )
        )
    return tuple(item for item in found if item.calls or item.forward_s or item.backward_s)


def own_times(recording: Recording, attribution: Attribution) -> tuple[Ints, Ints]:
    """(rows of operators, their nanoseconds without those of operators inside)."""
    host = recording.host
    rows = np.flatnonzero(host.kind == OPERATOR)
    lengths = host.end_ns - host.start_ns
    own = lengths.copy()
    nested = rows[attribution.parent[rows] >= 0]
    outer = attribution.operator[attribution.parent[nested]]
    np.subtract.at(own, outer[outer >= 0], lengths[nested[outer >= 0]])
    return rows, np.maximum(own[rows], 0)


def _by_name(names: tuple[str, ...], indices: Ints, lengths: Ints) -> tuple[OperatorTime, ...]:
    sums = np.bincount(indices, weights=lengths.astype(np.float64), minlength=1)
    counts = np.bincount(indices, minlength=1)
    merged: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for index in np.flatnonzero(counts).tolist():
        name = short_name(names[index])
        seconds, count = merged[name]
        merged[name] = (seconds + seconds_of_nanoseconds(float(sums[index])), count + int(counts[index]))
    ranked = sorted(merged.items(), key=lambda item: (-item[1][0], item[0]))[:MOST_ROWS]
    return tuple(OperatorTime(name=name, seconds=seconds, count=count) for name, (seconds, count) in ranked)


def _operators(recording: Recording, attribution: Attribution, inside: Flags) -> tuple[OperatorTime, ...]:
    """Device seconds by the innermost operator; on the CPU, an operator's own host seconds."""
    work, host = recording.work, recording.host
    if len(work):
        operator = attribution.of_work(attribution.operator, -1)
        rows = inside & (operator >= 0)
        if not rows.any():
            return ()
        return _by_name(recording.names, host.name[operator[rows]], (work.end_ns - work.start_ns)[rows])
    if not recording.on_cpu or not (host.kind == OPERATOR).any():
        return ()
    computed, own_ns = own_times(recording, attribution)
    return _by_name(recording.names, host.name[computed], own_ns)


def _host_rows(recording: Recording, window: Spans, kinds: tuple[int, ...]) -> tuple[OperatorTime, ...]:
    """Rows of the host that touch the window, each with the time from its begin to its end."""
    host = recording.host
    rows = np.flatnonzero(np.isin(host.kind, kinds) & (host.end_ns > _first(window)) & (host.start_ns < _last(window)))
    return _by_name(recording.names, host.name[rows], (host.end_ns - host.start_ns)[rows]) if len(rows) else ()


def _kernels(recording: Recording, inside: Flags) -> tuple[OperatorTime, ...]:
    work = recording.work
    rows = inside & ~np.isin(work.kind, (CLASS_INDEX[MEMCPY], CLASS_INDEX[MEMSET]))
    return _by_name(recording.names, work.name[rows], (work.end_ns - work.start_ns)[rows]) if rows.any() else ()


def _messages(recording: Recording, inside: Flags) -> tuple[MessageTime, ...]:
    """Communication kernels by collective, size and group; without device work what the host's annotations say, which
    are the communication itself only where gloo ran on the CPU."""
    work, host = recording.work, recording.host
    rows = np.flatnonzero(inside & (work.message >= 0))
    index, lengths, timed = work.message[rows], (work.end_ns - work.start_ns)[rows], True
    if not len(work):
        rows = np.flatnonzero((host.message >= 0) & (host.kind == MARK))
        index, lengths, timed = host.message[rows], (host.end_ns - host.start_ns)[rows], recording.on_cpu
    found = []
    for value, own in grouped(index, lengths):
        message, own = recording.messages[value], np.sort(own)
        total, fastest, median = int(own.sum()), int(own[0]), int(own[len(own) // 2])
        found.append(
            MessageTime(
                collective=message.collective,
                bytes=message.bytes,
                ranks=message.ranks,
                group=message.group,
                count=len(own),
                seconds=seconds_of_nanoseconds(total) if timed else None,
                fastest_s=seconds_of_nanoseconds(fastest) if timed else None,
                median_s=seconds_of_nanoseconds(median) if timed else None,
            )
        )
    return tuple(sorted(found, key=lambda item: -(item.seconds or 0.0))[:MOST_ROWS])


def grouped(keys: Ints, values: Ints) -> Iterator[tuple[int, Ints]]:
    """(key, its values) for each key."""
    order = np.argsort(keys, kind="stable")
    found, first = np.unique(keys[order], return_index=True)
    if len(found):
        yield from zip(found.tolist(), np.split(values[order], first[1:]), strict=True)


def _copies(recording: Recording, inside: Flags) -> tuple[CopyTime, ...]:
    work, found = recording.work, []
    rows = np.flatnonzero(inside & np.isin(work.kind, (CLASS_INDEX[MEMCPY], CLASS_INDEX[MEMSET])))
    for value, mine in grouped(work.name[rows], rows):
        found.append(
            CopyTime(
                kind=recording.names[value][:100],
                bytes=int(np.maximum(work.bytes[mine], 0).sum()),
                seconds=seconds_of_nanoseconds(int((work.end_ns[mine] - work.start_ns[mine]).sum())),
                count=len(mine),
            )
        )
    return tuple(sorted(found, key=lambda item: -item.seconds)[:MOST_ROWS])


def _streams(recording: Recording, inside: Flags, window: Spans) -> tuple[StreamTime, ...]:
    work, found = recording.work, []
    chosen = np.flatnonzero(inside)
    for index, rows in grouped(work.stream[chosen], chosen):
        stream = recording.streams[index]
        busy_s = covered_seconds(union(work.start_ns[rows], work.end_ns[rows]), window)
        found.append(
            StreamTime(
                device=stream.device,
                stream=stream.name,
                busy_s=busy_s,
                busy_fraction=min(1.0, busy_s / window.seconds) if window.seconds else 0.0,
                kernels=len(rows),
            )
        )
    return tuple(sorted(found, key=lambda item: -item.busy_s)[:MOST_ROWS])
