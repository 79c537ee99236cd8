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
_PIECE_ROWS = 100_000


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
    """Rows that a reader appends, kept as packed columns; `kinds`: q for 64 bits, i for 32, as in `array`."""

    def __init__(self, kinds: str) -> None:
        self._kinds, self._cells = kinds, array("q")
        self._pieces: list[list[Ints]] = [[] for _ in kinds]
        self._most = _PIECE_ROWS * len(kinds)

    def add(self, row: tuple[int, ...]) -> None:
        self._cells.extend(row)
        if len(self._cells) >= self._most:
            self._pack()

    def __len__(self) -> int:
        """Rows that have been added and not taken."""
        return sum(map(len, self._pieces[-1])) + len(self._cells) // len(self._kinds)

    def take(self, index: int) -> Ints:
        """A column, which is then no longer kept here: a million rows of all of them are 60 MB."""
        self._pack()
        pieces, self._pieces[index] = self._pieces[index], []
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def _pack(self) -> None:
        if self._cells:
            table = np.frombuffer(self._cells, np.int64).reshape(-1, len(self._kinds))
            for column, kind in enumerate(self._kinds):
                self._pieces[column].append(table[:, column].astype(np.int32 if kind == "i" else np.int64))
            self._cells = array("q")


# Of `Work` (class -1: by the name) and of `Host`, in the order of their fields.
WORK_KINDS, HOST_KINDS = "qqiiiqqiq", "qqiiiqqqiii"
