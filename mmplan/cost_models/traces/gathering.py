"""Rows of a recording as a reader finds them, and the recording that they make, with what is doubtful about it in
words.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from mmplan.cost_models.traces.intervals import Flags, Ints
from mmplan.cost_models.traces.kernel_classes import CLASS_INDEX, COMMUNICATION, collective, kernel_class
from mmplan.cost_models.traces.recording import (
    HOST_KINDS,
    WORK_KINDS,
    Call,
    Columns,
    Host,
    Indexed,
    Message,
    Recording,
    Stream,
    Work,
)
from mmplan.errors import InputError
from mmplan.scenario.document import counted

MOST_DISTINCT = 1_000_000
MOST_DEVICES, MOST_STREAMS = 64, 10_000
LONGEST_NAME = 1_000
_MOST_REASONS = 50
BY_NAME = -1  # the class of a kernel follows from its name
_DAY_NS = 86_400 * 10**9
_SLACK_NS = 60 * 10**9  # device work so far outside of what the host did has a broken clock

Times = tuple[int, int]


@dataclass(slots=True)
class Gathered:
    """What has been found so far. `dropped`: why rows were left out, and how many."""

    work: Columns = field(default_factory=lambda: Columns(WORK_KINDS))
    host: Columns = field(default_factory=lambda: Columns(HOST_KINDS))
    names: Indexed[str] = field(default_factory=Indexed)
    streams: Indexed[Stream] = field(default_factory=Indexed)
    threads: Indexed[str] = field(default_factory=Indexed)
    messages: Indexed[Message] = field(default_factory=Indexed)
    calls: Indexed[Call] = field(default_factory=Indexed)
    dropped: Counter[str] = field(default_factory=Counter)
    _is_message: dict[str, bool] = field(default_factory=dict)

    def add_work(
        self,
        times: Times,
        stream: Stream,
        name: str,
        kind: int,
        *,
        correlation: int = -1,
        external: int = -1,
        size_bytes: int = -1,
        message: Message | None = None,
    ) -> None:
        """A kernel (`BY_NAME`), copy or fill on the device."""
        index = -1
        if kind == BY_NAME and self.is_message(name):
            index = self.messages.of(message or Message(collective(name), None, None, ""))
        columns = (
            self.streams.of(stream),
            self.names.of(name if name.isprintable() else _printable(name)),
            kind,
            correlation,
            external,
            index,
            size_bytes,
        )
        self.work.add((*times, *columns))

    def add_host(
        self,
        times: Times,
        thread: str,
        name: str,
        kind: int,
        *,
        correlation: int = -1,
        external: int = -1,
        sequence: int = -1,
        backward: bool = False,
        message: Message | None = None,
        call: Call | None = None,
    ) -> None:
        """An operator, call, range or function of the host."""
        said = (
            self.messages.of(message) if message is not None else -1,
            self.calls.of(call) if call is not None else -1,
        )
        columns = (
            self.threads.of(thread),
            self.names.of(name if name.isprintable() else _printable(name)),
            kind,
            correlation,
            external,
            sequence,
            int(backward),
        )
        self.host.add((*times, *columns, *said))

    @property
    def distinct(self) -> int:
        """Different names, streams, threads, messages and sizes that are kept."""
        kept = (self.names, self.streams, self.threads, self.messages, self.calls)
        return sum(len(indexed.values) for indexed in kept)

    def drop(self, reason: str) -> None:
        """Count a row that is left out; of very many reasons only the first ones are told apart."""
        self.dropped[reason if len(self.dropped) < _MOST_REASONS or reason in self.dropped else "other reasons"] += 1

    def is_message(self, name: str) -> bool:
        """Whether a kernel of this name communicates."""
        found = self._is_message.get(name)
        if found is None:
            found = self._is_message[name] = kernel_class(name) == COMMUNICATION
        return found

    def recording(
        self,
        source: str,
        file: str,
        *,
        rank: int | None,
        world_size: int | None,
        device_names: dict[int, str],
        on_cpu: bool,
        span_ns: Times | None = None,
        warnings: tuple[str, ...] = (),
        ignored: tuple[str, ...] = (),
    ) -> Recording:
        """All rows in order, each once."""
        told, left = list(warnings), list(ignored)
        left += [f"{file}: {counted(count, 'event')} with {reason}" for reason, count in sorted(self.dropped.items())]
        devices = {stream.device for stream in self.streams.values}
        if len(devices) > MOST_DEVICES or len(self.streams.values) > MOST_STREAMS:
            found = f"work on {len(devices):,} devices and {len(self.streams.values):,} streams"
            raise InputError(f"{found}: one process has at most {MOST_DEVICES} and {MOST_STREAMS:,}", file=file)
        work, twice = _work_of(self.work, self.names)
        host, also_twice = _host_of(self.host)
        if twice + also_twice:
            told.append(f"{file}: {counted(twice + also_twice, 'event')} stand twice and are counted once")
        work, host, stray = _of_one_time(work, host)
        if stray:
            told.append(f"{file}: {counted(stray, 'event')} are more than a day off the others: left out")
        work, outside = _on_clock(work, host)
        if outside:
            told.append(
                f"{file}: {counted(outside, 'event')} of the device are a minute off the host's clock: left out"
            )
        return Recording(
            source=source,
            file=file,
            rank=rank,
            world_size=world_size,
            device_name=self._device_name(work, device_names),
            on_cpu=on_cpu and not len(work),
            names=tuple(self.names.values),
            streams=tuple(self.streams.values),
            threads=tuple(self.threads.values),
            messages=tuple(self.messages.values),
            calls=tuple(self.calls.values),
            work=work,
            host=host,
            span_ns=span_ns,
            ignored=tuple(left),
            warnings=tuple(told),
        )

    def _device_name(self, work: Work, names: dict[int, str]) -> str:
        """Of the device that has the most work, as the driver calls it."""
        if not len(work):
            return names.get(0, "")
        devices = np.array([stream.device for stream in self.streams.values], np.int64)[work.stream]
        values, counts = np.unique(devices, return_counts=True)
        return names.get(int(values[counts.argmax()]), "")


def _printable(name: str) -> str:
    """Without control characters and halves of surrogate pairs, which neither a terminal nor a file takes."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _work_of(rows: Columns, names: Indexed[str]) -> tuple[Work, int]:
    """The rows by start, and how many stood twice."""
    start_ns, end_ns, stream, name, kind = (rows.take(column) for column in range(5))
    used = np.zeros(len(names.values), bool)
    used[name[kind == BY_NAME]] = True
    of_name = [CLASS_INDEX[kernel_class(text)] if used[i] else 0 for i, text in enumerate(names.values)]
    kind = np.where(kind == BY_NAME, np.array(of_name, np.int32)[name], kind) if of_name else kind
    correlation = rows.take(5)
    order = np.lexsort((name, correlation, stream, end_ns, start_ns))
    order = order[_first_of_equals(order, start_ns, end_ns, stream, name, correlation)]
    columns = (start_ns, end_ns, stream, name, kind, correlation)
    ordered = [column[order] for column in columns] + [rows.take(column)[order] for column in range(6, 9)]
    return Work(**dict(zip(Work.__slots__, ordered, strict=True))), len(start_ns) - len(order)


def _host_of(rows: Columns) -> tuple[Host, int]:
    """The rows in nesting order, and how many stood twice; without an id two equal rows may be two calls.

    Of equal spans the operator that was called first (the smaller id) holds the other, a range without an id both.
    """
    start_ns, end_ns, thread, name, kind, correlation, external = (rows.take(column) for column in range(7))
    order = np.lexsort((name, external, -end_ns, start_ns, thread))
    first = _first_of_equals(order, start_ns, end_ns, thread, name, kind, correlation, external)
    order = order[first | ((correlation < 0) & (external < 0))[order]]
    found, count = {}, len(start_ns)
    found["start_ns"] = start_ns[order]
    del start_ns
    found["end_ns"] = end_ns[order]
    del end_ns
    columns = {"thread": thread, "name": name, "kind": kind, "correlation": correlation, "external": external}
    found |= {field: column[order] for field, column in columns.items()}
    del columns, thread, name, kind, correlation, external
    for index, field_name in enumerate(("sequence", "backward", "message", "call"), 7):
        found[field_name] = rows.take(index)[order]
    return Host(**found), count - len(order)


def _first_of_equals(order: Ints, *columns: Ints) -> Flags:
    """In sorted order, the rows that differ from the one before in any column."""
    differs = np.ones(len(order), bool)
    if len(order):
        differs[1:] = False
    for column in columns:
        ordered = column[order]
        differs[1:] |= ordered[1:] != ordered[:-1]
    return differs


def _of_one_time(work: Work, host: Host) -> tuple[Work, Host, int]:
    """Rows within a day of the median of all: a profile lasts minutes, a broken clock says 1970."""
    starts = np.concatenate((work.start_ns, host.start_ns))
    if len(starts) == 0:
        return work, host, 0
    middle_ns = int(np.partition(starts, len(starts) // 2)[len(starts) // 2])
    of_work, of_host = (np.abs(rows.start_ns - middle_ns) <= _DAY_NS for rows in (work, host))
    stray = int((~of_work).sum() + (~of_host).sum())
    return (_chosen_work(work, of_work), _chosen_host(host, of_host), stray) if stray else (work, host, 0)


def _on_clock(work: Work, host: Host) -> tuple[Work, int]:
    """The device's rows within a minute of the host's."""
    if not len(work) or not len(host):
        return work, 0
    first_ns, last_ns = int(host.start_ns.min()) - _SLACK_NS, int(host.end_ns.max()) + _SLACK_NS
    keep = (work.start_ns >= first_ns) & (work.end_ns <= last_ns)
    return (work if keep.all() else _chosen_work(work, keep)), int((~keep).sum())


def _chosen_work(work: Work, rows: Flags) -> Work:
    return Work(**{name: getattr(work, name)[rows] for name in Work.__slots__})


def _chosen_host(host: Host, rows: Flags) -> Host:
    return Host(**{name: getattr(host, name)[rows] for name in Host.__slots__})
