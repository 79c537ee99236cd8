"""What was measured in traces, as a document that a later comparison with a plan's prediction can read.

`mmplan.trace/1`: per rank the seconds of steps, classes of kernels, communication and idle time, and the findings. All
times are seconds; those of a window hold each moment once: compute + exposed communication + exposed copies + idle =
window.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from mmplan.errors import InputError
from mmplan.scenario.document import read_document

SCHEMA: Literal["mmplan.trace/1"] = "mmplan.trace/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassTime:
    """Kernels of a class: moments in which any of them runs, and how many there are."""

    name: str
    seconds: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTime:
    """An operator, kernel, range or call: device seconds summed over its calls, for one of the host its own; none where
    a file holds no times."""

    name: str
    seconds: float | None
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageTime:
    """Calls of one collective with one size: `bytes` of the full tensor, None where the trace does not say; no seconds
    where only the host's part of the calls was recorded."""

    collective: str
    bytes: int | None
    ranks: int | None
    group: str
    count: int
    seconds: float | None
    fastest_s: float | None
    median_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductCount:
    """[rows, inner] x [inner, outer], how often: where a file has sizes and no times."""

    rows: int
    inner: int
    outer: int
    dtype: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyTime:
    kind: str
    bytes: int
    seconds: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamTime:
    """`busy_s` of the window; the rest is idle."""

    device: int
    stream: str
    busy_s: float
    busy_fraction: float
    kernels: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTime:
    """One device over the window. `communication_s` is all of it, hidden behind compute or not."""

    device: int
    compute_s: float
    exposed_communication_s: float
    exposed_copy_s: float
    idle_s: float
    communication_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTime:
    """A part of a multimodal model: `calls` of its forward; device seconds of all of them."""

    name: str
    calls: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """A wait of at least 5 ms. `kind`: idle (nothing runs), or communication only. `begin_s`: from the window's
    begin.
    """

    kind: Literal["idle", "communication only"]
    device: int
    begin_s: float
    length_s: float
    cause: str
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LockCluster:
    """Short waits for locks, at least ten in each millisecond."""

    name: str
    begin_s: float
    length_s: float
    waits: int
    per_ms: float
    threads: int
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """One process. `step_s` are its steps in order; `window_s` spans them, or all device work where nothing marks
    steps.
    """

    file: str
    source: str
    rank: int | None = None
    world_size: int | None = None
    device: str = ""
    marked_by: str = ""
    step_s: tuple[float, ...] = ()
    window_s: float = 0.0
    devices: tuple[DeviceTime, ...] = ()
    classes: tuple[ClassTime, ...] = ()
    phases: tuple[ClassTime, ...] = ()
    parts: tuple[PartTime, ...] = ()
    operators: tuple[OperatorTime, ...] = ()
    kernels: tuple[OperatorTime, ...] = ()
    host_ranges: tuple[OperatorTime, ...] = ()
    calls: tuple[OperatorTime, ...] = ()
    messages: tuple[MessageTime, ...] = ()
    products: tuple[ProductCount, ...] = ()
    copies: tuple[CopyTime, ...] = ()
    streams: tuple[StreamTime, ...] = ()
    gaps: tuple[Gap, ...] = ()
    locks: tuple[LockCluster, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWait:
    """Of the collectives that all these files hold: how long this rank's calls lasted beyond the fastest rank's.

    The rank that the others wait for has the least. `clock_offset_s`: its clock against the first rank's, by the ends
    of all-reduces.
    """

    rank: int | None
    file: str
    wait_s: float
    collectives: int
    clock_offset_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRecord:
    schema: Literal["mmplan.trace/1"]
    ranks: tuple[RankTrace, ...]
    waits: tuple[RankWait, ...] = ()


MOST_BYTES, MOST_VALUES = 32_000_000, 3_000_000  # of a record of a thousand ranks

_RECORD = TypeAdapter(TraceRecord)


def record_document(record: TraceRecord) -> dict[str, object]:
    """As YAML values, times with six digits."""
    document: dict[str, object] = _RECORD.dump_python(record, mode="json")
    rounded = _six_digits(document)
    assert isinstance(rounded, dict)
    return rounded


def _six_digits(value: object) -> object:
    if isinstance(value, dict):
        return {key: _six_digits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_six_digits(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def load_trace_record(path: Path) -> TraceRecord:
    """Read a record that `mmplan import` wrote.

    Raises:
        InputError: one sentence with file, line and key.
    """
    document = read_document(path, MOST_BYTES, MOST_VALUES)
    try:
        return _RECORD.validate_python(document.values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"]
        raise document.error(tuple(first["loc"]), f"{message[:1].lower()}{message[1:]}") from None
    except TypeError as error:  # keys that are no words
        raise InputError(f"not a trace record: {error}", file=path) from error
