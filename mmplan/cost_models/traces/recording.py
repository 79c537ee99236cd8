"""What a profiler recorded of one process, in columns: work on the device, calls on the host, messages between ranks.

The neutral form that readers of Kineto and Nsight Systems files give and every analysis takes. Times are integer
nanoseconds on the clock of the file. A million events take about 100 MB.
"""

from array import array
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from mmplan.cost_models.traces.intervals import Ints

# Kinds of host rows: an operator, a call of the driver, a named range, a Python function, a call of the C library.
OPERATOR, CALL, MARK, PYTHON, SYSTEM = range(5)


@dataclass(frozen=True, slots=True)
class Message:
    """A collective: `bytes` of the full tensor (what an all-gather ends with, a reduce-scatter begins with)."""

    collective: str
    bytes: int | None
    ranks: int | None
    group: str
    members: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of one device."""

    device: int
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """What an operator was given, where the profiler recorded it: sizes of its tensors, their types, its other
    inputs.
    """

    sizes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    scalars: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Kernels, copies and fills, by start. `kind` indexes `CLASS_NAMES`; -1: not recorded."""

    start_ns: Ints
    end_ns: Ints
    stream: Ints
    name: Ints
    kind: Ints
    correlation: Ints
    external: Ints
    message: Ints
    bytes: Ints

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Rows by thread, start and longest first, so that a row stands after those it is nested in. -1: not recorded."""

    start_ns: Ints
    end_ns: Ints
    thread: Ints
    name: Ints
    kind: Ints
    correlation: Ints
    external: Ints
    sequence: Ints
    backward: Ints  # 1: runs for an operator of another thread's forward
    message: Ints
    call: Ints

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One process. `names`, `streams`, `threads`, `messages`, `calls` are what the columns index.

    `device_name`: as the driver calls it, empty where unknown. `on_cpu`: the job computes on the CPU, so that a file
    without device work is whole. `span_ns`: begin and end of recording, where the file says them.
    """

    source: str
    file: str
    rank: int | None
    world_size: int | None
    device_name: str
    on_cpu: bool
    names: tuple[str, ...]
    streams: tuple[Stream, ...]
    threads: tuple[str, ...]
    messages: tuple[Message, ...]
    calls: tuple[Call, ...]
    work: Work
    host: Host
    span_ns: tuple[int, int] | None = None
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else self.file


T = TypeVar("T")


@dataclass(slots=True)
class Indexed(Generic[T]):
    """Values that repeat, each kept once: `of(value)` is its index."""

    values: list[T] = field(default_factory=list)
    index: dict[T, int] = field(default_factory=dict)

    def of(self, value: T) -> int:
        found = self.index.get(value)
        if found is None:
            found = self.index[value] = len(self.values)
            self.values.append(value)
        return found


class Columns:
    """Rows that a reader appends, of 64-bit integers."""

    def __init__(self, width: int) -> None:
        self.width, self.cells = width, array("q")

    def add(self, row: tuple[int, ...]) -> None:
        self.cells.extend(row)

    def table(self) -> Ints:
        """[width, rows]."""
        return np.frombuffer(self.cells, dtype=np.int64).reshape(-1, self.width).T if self.cells else self._none()

    def _none(self) -> Ints:
        return np.zeros((self.width, 0), np.int64)


WORK_WIDTH, HOST_WIDTH = 9, 11
