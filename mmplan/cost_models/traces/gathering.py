"""Rows of a recording as a reader finds them, and the recording that they make, with what is doubtful about it in
words.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from mmplan.cost_models.traces.intervals import Flags, Ints
from mmplan.cost_models.traces.kernel_classes import CLASS_INDEX, COMMUNICATION, collective, kernel_class
from mmplan.cost_models.traces.recording import (
    HOST_WIDTH,
    WORK_WIDTH,
    Call,
    Columns,
    Host,
    Indexed,
    Message,
    Recording,
    Stream,
    Work,
)
from mmplan.scenario.document import counted

BY_NAME = -1  # the class of a kernel follows from its name
_SLACK_NS = 60 * 10**9  # device work so far outside of what the host did has a broken clock

Times = tuple[int, int]


@dataclass(slots=True)
class Gathered:
    """What has been found so far. `dropped`: why rows were left out, and how many."""

    work: Columns = field(default_factory=lambda: Columns(WORK_WIDTH))
    host: Columns = field(default_factory=lambda: Columns(HOST_WIDTH))
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
        columns = (self.streams.of(stream), self.names.of(name), kind, correlation, external, index, size_bytes)
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
        columns = (self.threads.of(thread), self.names.of(name), kind, correlation, external, sequence, int(backward))
        self.host.add((*times, *columns, *said))

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
        work, twice = _work_of(self.work, self.names)
        host, also_twice = _host_of(self.host)
        if twice + also_twice:
            told.append(f"{file}: {counted(twice + also_twice, 'event')} stand twice and are counted once")
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


def _work_of(rows: Columns, names: Indexed[str]) -> tuple[Work, int]:
    """The rows by start, and how many stood twice."""
    table = rows.table()
    used = np.zeros(len(names.values), bool)
    used[table[3][table[4] == BY_NAME]] = True
    kinds = np.array(
        [CLASS_INDEX[kernel_class(name)] if used[i] else 0 for i, name in enumerate(names.values)], np.int64
    )
    by_name = kinds[table[3]] if len(kinds) else table[4]
    kind = np.where(table[4] == BY_NAME, by_name, table[4])
    order = np.lexsort((table[3], table[5], table[2], table[1], table[0]))
    chosen = _once(table[:, order])
    start_ns, end_ns, stream, name, _, correlation, external, message, size = table[:, order][:, chosen]
    work = Work(
        start_ns=start_ns,
        end_ns=end_ns,
        stream=stream,
        name=name,
        kind=kind[order][chosen],
        correlation=correlation,
        external=external,
        message=message,
        bytes=size,
    )
    return work, int((~chosen).sum())


def _host_of(rows: Columns) -> tuple[Host, int]:
    """The rows in nesting order, and how many stood twice; without an id two equal rows may be two calls."""
    table = rows.table()
    kept = table[:, np.lexsort((table[6], table[3], -table[1], table[0], table[2]))]
    chosen = _once(kept) | ((kept[5] < 0) & (kept[6] < 0))
    fields = ("start_ns", "end_ns", "thread", "name", "kind", "correlation", "external", "sequence", "backward")
    return Host(**dict(zip((*fields, "message", "call"), kept[:, chosen], strict=True))), int((~chosen).sum())


def _once(table: Ints) -> Flags:
    """Columns of a sorted table that differ from the one before."""
    first = np.ones(min(1, table.shape[1]), bool)
    return np.concatenate((first, (table[:, 1:] != table[:, :-1]).any(axis=0))) if table.shape[1] > 1 else first


def _on_clock(work: Work, host: Host) -> tuple[Work, int]:
    """The device's rows within a minute of the host's."""
    if not len(work) or not len(host):
        return work, 0
    first_ns, last_ns = int(host.start_ns.min()) - _SLACK_NS, int(host.end_ns.max()) + _SLACK_NS
    keep = (work.start_ns >= first_ns) & (work.end_ns <= last_ns)
    kept = Work(**{name: getattr(work, name)[keep] for name in Work.__slots__})
    return kept, int((~keep).sum())
