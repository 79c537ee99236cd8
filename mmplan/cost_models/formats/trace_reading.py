"""Recordings as a reading: the record of measured seconds, with what was found and what is missing in words."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mmplan.cost_models.formats.kineto import read_recording
from mmplan.cost_models.formats.nsys_sqlite import is_sqlite, read_database
from mmplan.cost_models.formats.nsys_stats import REPORTS, Stats, read_stats
from mmplan.cost_models.formats.trace_doubts import doubts, missing, set_doubts_of
from mmplan.cost_models.traces.attribution import Attribution, attribute
from mmplan.cost_models.traces.host_activity import OWN_WORK
from mmplan.cost_models.traces.messages import with_messages
from mmplan.cost_models.traces.rank_sets import rank_waits
from mmplan.cost_models.traces.record import SCHEMA, RankTrace, TraceRecord, record_document
from mmplan.cost_models.traces.recording import Recording
from mmplan.cost_models.traces.steps import steps_of
from mmplan.cost_models.traces.summary import rank_trace, shortened
from mmplan.errors import InputError
from mmplan.scenario.document import counted
from mmplan.scenario.formats.reading import Head, Reading
from mmplan.units import format_seconds

MOST_FILES = 4_096
_TOLD_FINDINGS = 5
_FEW_RANKS, _ROWS_OF_MANY, _MOST_STEPS = 8, 10, 2_000


@dataclass(frozen=True, slots=True)
class Analysed:
    """A recording with where its kernels come from."""

    recording: Recording
    attribution: Attribution


def analysed(recording: Recording) -> Analysed:
    """Kernels joined to the host, messages with their sizes."""
    attribution = attribute(recording)
    return Analysed(with_messages(recording, attribution), attribution)


def looks_like_kineto(head: Head) -> bool:
    """Chrome JSON with something that only PyTorch writes."""
    text = head.text.lstrip()
    if not text.startswith(("{", "[")):
        return False
    own = (
        "PyTorch Profiler",
        '"Ev Idx"',
        '"External id"',
        '"cpu_op"',
        '"cuda_runtime"',
        '"ProfilerStep',
        "ac2g",
        '"kernel"',
    )
    other = (
        '"deviceProperties"',
        '"distributedInfo"',
        "aten::",
        '"python_function"',
        '"CPU functions"',
        '"gpu_memcpy"',
    )
    events = '"traceEvents"' in text or '"ph"' in text or '"schemaVersion"' in text
    return events and any(word in text for word in own + other)


def recordings_of(paths: Sequence[Path]) -> tuple[Recording, ...]:
    """Of traces of the PyTorch profiler or databases of Nsight Systems.

    Raises:
        InputError: no files, or one that is neither.
    """
    if not 0 < len(paths) <= MOST_FILES:
        raise InputError(f"{len(paths):,} files: one for each of at most {MOST_FILES:,} ranks are read")
    found = list[Recording]()
    for path in paths:
        found += read_database(path) if is_sqlite(path) else (read_recording(path),)
    return tuple(found)


def read_kineto(paths: Sequence[Path]) -> Reading:
    """The record of one or more files, one for each rank.

    Raises:
        InputError: a file that is no trace of the profiler, or too many.
    """
    return trace_reading("kineto", recordings_of(paths))


def looks_like_nsys(head: Head) -> bool:
    """An SQLite file, or a table under the headings of `nsys stats` or nvprof."""
    if head.text.startswith("SQLite format 3") or "CUPTI_ACTIVITY_KIND_" in head.text:
        return True
    if head.path.suffix.lower() in REPORTS:
        return True  # refused with the command that makes one that can be read
    time, name = (
        re.search(r"Total (Proj )?Time|Time ?\(%\)|Duration \(", head.text),
        re.search(r"\b(Name|Operation|Range)\b", head.text),
    )
    return (
        time is not None
        and name is not None
        and re.search(r"Instances|Num Calls|Count|Calls|Strm", head.text) is not None
    )


def read_nsys(paths: Sequence[Path]) -> Reading:
    """The record of SQLite exports of Nsight Systems and nvprof, and of tables that `nsys stats` printed.

    Raises:
        InputError: a file that is neither.
    """
    recordings, stats = list[Recording](), list[Stats]()
    for path in paths:
        if is_sqlite(path):
            recordings += read_database(path)
        else:
            stats.append(read_stats(path))
    recordings += [item.recording for item in stats if item.recording is not None]
    return trace_reading("nsys", tuple(recordings), tuple(stats))


def trace_reading(kind: str, recordings: tuple[Recording, ...], stats: tuple[Stats, ...] = ()) -> Reading:
    """The reading of recordings that are one job's, and of sums of profiles without times."""
    recordings = tuple(sorted(recordings, key=lambda item: (item.rank is None, item.rank or 0)))
    ranks, read, ignored, warnings, joined = [], list[str](), list[str](), list[str](), list[Recording]()
    for recording in recordings:
        item = analysed(recording)
        steps = steps_of(item.recording, item.attribution.launch)
        trace, waits = rank_trace(item.recording, item.attribution, steps)
        if len(trace.step_s) > _MOST_STEPS:
            ignored.append(f"{trace.file}: {len(trace.step_s):,} steps: the record holds the first {_MOST_STEPS:,}")
            trace = replace(trace, step_s=trace.step_s[:_MOST_STEPS])
        ranks.append(trace if len(recordings) <= _FEW_RANKS else shortened(trace, _ROWS_OF_MANY))
        joined.append(item.recording)
        read += _told(trace)
        warnings += [*recording.warnings, *doubts(item.recording, item.attribution)]
        ignored += [*recording.ignored, *missing(item.recording, trace)]
        warnings += _findings(trace, waits)
    for sums in stats:
        warnings += sums.warnings
        ignored += sums.ignored
        if sums.trace is not None:
            ranks.append(sums.trace)
            read += _told_sums(sums.trace)
            ignored.append(
                f"{sums.trace.file}: when things ran (steps, overlap, idle time): `nsys export --type sqlite` has it"
            )
    waits_of_ranks, notes = rank_waits(tuple(joined))
    record = TraceRecord(schema=SCHEMA, ranks=tuple(ranks), waits=waits_of_ranks)
    return Reading(
        kind=kind,
        fragment=record_document(record),
        document="record of measured seconds",
        read=tuple(read),
        ignored=tuple(dict.fromkeys(ignored)),
        warnings=tuple(dict.fromkeys([*set_doubts_of(recordings), *notes, *warnings])),
    )


def _told(trace: RankTrace) -> list[str]:
    """A sentence or two per file."""
    who = f"rank {trace.rank}" if trace.rank is not None else trace.file
    if trace.marked_by:
        middle = sorted(trace.step_s)[len(trace.step_s) // 2]
        sentences = [
            f"{who}: {counted(len(trace.step_s), 'step')} by {trace.marked_by}, median {format_seconds(middle)}"
        ]
    else:
        sentences = [f"{who}: no marks of steps; all {format_seconds(trace.window_s)} are one stretch"]
    for time in trace.devices:
        shares = {
            "computes": time.compute_s,
            "only communicates": time.exposed_communication_s,
            "only copies": time.exposed_copy_s,
            "idles": time.idle_s,
        }
        if trace.window_s > 0:
            parts = ", ".join(f"{verb} {seconds / trace.window_s:.1%}" for verb, seconds in shares.items())
            sentences.append(f"{who}: device {time.device} {parts} of {format_seconds(trace.window_s)}")
    return sentences


def _told_sums(trace: RankTrace) -> list[str]:
    total_s = sum(item.seconds for item in trace.classes)
    shares = ", ".join(f"{item.name} {format_seconds(item.seconds)}" for item in trace.classes[:4])
    kernels = sum(item.count for item in trace.classes)
    found = (
        [f"{trace.file}: {counted(kernels, 'kernel')}, {format_seconds(total_s)} in all: {shares}"] if total_s else []
    )
    if trace.calls:
        longest = trace.calls[0]
        seconds = format_seconds(longest.seconds or 0.0)
        found.append(f"{trace.file}: calls, most time in {longest.name}: {longest.count:,}, {seconds}")
    if trace.host_ranges:
        found.append(f"{trace.file}: {counted(len(trace.host_ranges), 'named range')}")
    if trace.parts:
        found.append(f"{trace.file}: device time of {', '.join(part.name for part in trace.parts)}")
    return found


def _findings(trace: RankTrace, waits: int) -> list[str]:
    """The longest waits and the densest clusters in words; all are in the record."""
    who = f"rank {trace.rank}" if trace.rank is not None else trace.file
    sentences = []
    for kind, words in (("idle", "idle"), ("communication only", "only communicates")):
        gaps = sorted((gap for gap in trace.gaps if gap.kind == kind), key=lambda gap: -gap.length_s)
        for gap in gaps[:_TOLD_FINDINGS]:
            begin, length = format_seconds(gap.begin_s), format_seconds(gap.length_s)
            host = f" ({gap.host})" if gap.host and OWN_WORK in gap.cause else ""
            sentences.append(f"{who}: device {gap.device} {words} for {length} at {begin}: {gap.cause}{host}")
        causes = Counter(gap.cause for gap in gaps[_TOLD_FINDINGS:])
        if causes:
            most, count = causes.most_common(1)[0]
            rest = f"{len(gaps) - _TOLD_FINDINGS} more such waits of 5 ms or longer, {count} of them: {most}"
            sentences.append(f"{who}: {rest}")
    if waits > len(trace.gaps):
        sentences.append(f"{who}: {waits:,} waits of 5 ms or longer, the record holds the {len(trace.gaps):,} longest")
    for cluster in trace.locks[:_TOLD_FINDINGS]:
        sentences.append(
            f"{who}: {cluster.waits:,} short waits in {cluster.name} within {format_seconds(cluster.length_s)} at "
            f"{format_seconds(cluster.begin_s)}, {cluster.per_ms:.0f} per ms: {cluster.cause}"
        )
    return sentences
