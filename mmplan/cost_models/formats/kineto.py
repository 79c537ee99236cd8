"""Traces of the PyTorch profiler (Kineto, Chrome JSON): one file of one process, event by event into a recording.

Times are microseconds in every version, whole or with a fraction, whatever `displayTimeUnit` says; the clock starts
anywhere. Category names differ between versions (`Kernel`, `kernel`; `Operator`, `cpu_op`; `Runtime`, `cuda_runtime`).
"""

import ast
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mmplan.cost_models.formats.json_stream import Broken, Cut, json_items
from mmplan.cost_models.formats.kineto_arguments import NCCL, call_of, integer, message_of
from mmplan.cost_models.formats.look_alikes import tool_of
from mmplan.cost_models.traces.kernel_classes import (
    CLASS_INDEX,
    COMMUNICATION,
    MEMCPY,
    MEMSET,
    collective,
    kernel_class,
)
from mmplan.cost_models.traces.recording import (
    CALL,
    HOST_WIDTH,
    MARK,
    OPERATOR,
    PYTHON,
    WORK_WIDTH,
    Call,
    Columns,
    Host,
    Indexed,
    Message,
    Recording,
    Stream,
    Work,
    chosen_work,
    host_of,
    work_of,
)
from mmplan.errors import InputError
from mmplan.scenario.document import counted
from mmplan.units import nanoseconds_of_microseconds

_DEVICE: dict[str, str | int] = {
    "kernel": -1,
    "concurrent_kernel": -1,
    "gpu_memcpy": MEMCPY,
    "memcpy": MEMCPY,
    "gpu_memset": MEMSET,
    "memset": MEMSET,
}
_DEVICE_KIND: dict[str, int] = {
    category: CLASS_INDEX[kind] if isinstance(kind, str) else kind for category, kind in _DEVICE.items()
}
_HOST_KIND = {
    **dict.fromkeys(("cpu_op", "operator", "hpu_op"), OPERATOR),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "hip_api"), CALL),
    **dict.fromkeys(("xpu_runtime", "xpu_driver", "mtia_runtime", "privateuse1_runtime", "glow_runtime"), CALL),
    "user_annotation": MARK,
    "python_function": PYTHON,
    "python": PYTHON,
}
# Rows that repeat, on the device's rows, what host rows or kernels say; or that say what the profiler itself cost.
_REPEATS = {
    "gpu_user_annotation", "cuda_sync", "cuda_profiler_range", "overhead", "trace", "ac2g", "async_cpu_to_gpu",
    "async_gpu", "fwdbwd", "forward_backward", "collective_comm", "cpu_instant_event", "external_correlation",
}  # fmt: skip
_LEGACY = ("CPU functions", "CUDA functions")  # torch.autograd.profiler's own export

MOST_US, MOST_LENGTH_US = 4.6e15, 1e12  # the year 2115 on a Unix clock; eleven days
MOST_EVENTS = 40_000_000
MOST_NAMES = 2_000_000
_SLACK_NS = 60 * 10**9  # device work so far outside of what the host did has a broken clock
_RANK_IN_NAME = re.compile(r"(?<![a-z])rank[-_. ]?(\d{1,6})(?!\d)", re.IGNORECASE)


@dataclass(slots=True)
class _Rows:
    """What has been gathered so far."""

    work: Columns = field(default_factory=lambda: Columns(WORK_WIDTH))
    host: Columns = field(default_factory=lambda: Columns(HOST_WIDTH))
    names: Indexed[str] = field(default_factory=Indexed)
    streams: Indexed[Stream] = field(default_factory=Indexed)
    threads: Indexed[str] = field(default_factory=Indexed)
    messages: Indexed[Message] = field(default_factory=Indexed)
    calls: Indexed[Call] = field(default_factory=Indexed)
    dropped: Counter[str] = field(default_factory=Counter)
    labels: list[str] = field(default_factory=list)
    is_message: dict[str, bool] = field(default_factory=dict)
    span_ns: tuple[int, int] | None = None
    events: int = 0


def read_recording(path: Path) -> Recording:
    """The recording of one file, plain or gzip.

    Raises:
        InputError: cannot be read, is no JSON, is another tool's trace, holds no event of the profiler.
    """
    rows, head, cut = _Rows(), dict[str, object](), None
    other: list[dict[str, object]] = []
    for key, value in json_items(path, ("traceEvents",)):
        if isinstance(value, Cut):
            cut = value
        elif isinstance(value, Broken):
            rows.dropped["no JSON"] += 1
        elif key not in ("traceEvents", ""):
            head[key] = value
        elif not isinstance(value, dict):
            rows.dropped["no object"] += 1
        elif not _add(value, rows) and len(other) < 2_000:
            other.append(value)
        if rows.events > MOST_EVENTS or len(rows.names.values) > MOST_NAMES:
            most = f"{MOST_EVENTS:,} events or {MOST_NAMES:,} names"
            raise InputError(f"more than {most}: profile fewer steps", file=path)
    if not rows.work.cells and not rows.host.cells:
        tool = tool_of(head, other, rows.labels)
        message = f"no event of the PyTorch profiler in it{f': {tool}' if tool else ''}"
        raise InputError(message, file=path, line=cut.line if cut else None)
    return _recording(path, rows, head, cut, other)


def _add(event: dict[str, object], rows: _Rows) -> bool:
    """Take an event; False where it is none of the profiler's."""
    rows.events += 1
    phase, category = event.get("ph"), event.get("cat")
    if phase != "X":
        if phase == "M":
            _label(event, rows)
        return phase in ("M", "s", "f", "t", "i", "I", "C") and (category is None or str(category).lower() in _REPEATS)
    known = category.lower() if isinstance(category, str) else None
    process = event.get("pid")
    if known is None and isinstance(process, str) and process in _LEGACY:
        known = "operator" if process == "CPU functions" else "kernel"
    if known == "trace":
        _span(event, rows)
    if known in _REPEATS:
        return True
    kind, device_kind = _HOST_KIND.get(known or ""), _DEVICE_KIND.get(known or "")
    if kind is None and device_kind is None:
        if known is not None:
            rows.dropped[f"category '{known[:40]}'"] += 1
        return False
    times = _times(event, rows)
    if times is None:
        return True
    name = event.get("name")
    text = name if isinstance(name, str) else str(name)[:100]
    values = event.get("args")
    arguments = values if isinstance(values, dict) else {}
    if kind is None:
        assert device_kind is not None
        _add_work(event, text, device_kind, times, arguments, rows)
    else:
        _add_host(event, text, kind, times, arguments, rows)
    return True


def _add_work(
    event: dict[str, object], name: str, kind: int, times: tuple[int, int], arguments: dict[str, object], rows: _Rows
) -> None:
    device = integer(arguments.get("device", event.get("pid")))
    stream = Stream(device if device >= 0 else 0, str(arguments.get("stream", event.get("tid")))[:40])
    message = -1
    if kind < 0 and name not in rows.is_message:
        rows.is_message[name] = kernel_class(name) == COMMUNICATION
    if kind < 0 and rows.is_message[name]:
        message = rows.messages.of(message_of(name, arguments) or Message(collective(name), None, None, ""))
    rows.work.add(
        (
            *times,
            rows.streams.of(stream),
            rows.names.of(name),
            kind,
            integer(arguments.get("correlation", arguments.get("correlation id"))),
            integer(arguments.get("External id", arguments.get("external id"))),
            message,
            integer(arguments.get("bytes", arguments.get("size"))),
        )
    )


def _add_host(
    event: dict[str, object], name: str, kind: int, times: tuple[int, int], arguments: dict[str, object], rows: _Rows
) -> None:
    message = call = -1
    if kind == OPERATOR and name.startswith("ProfilerStep"):
        kind = MARK
    if kind == MARK or (kind == OPERATOR and name == "record_param_comms"):
        found = message_of(name, arguments)
        message = rows.messages.of(found) if found else -1
    if kind == OPERATOR:
        given = call_of(name, arguments)
        call = rows.calls.of(given) if given else -1
    forward_thread = integer(arguments.get("Fwd thread id", arguments.get("Fwd thread")))
    rows.host.add(
        (
            *times,
            rows.threads.of(f"{event.get('pid')}/{event.get('tid')}"[:80]),
            rows.names.of(name),
            kind,
            integer(arguments.get("correlation", arguments.get("correlation id"))),
            integer(arguments.get("External id", arguments.get("external id"))),
            integer(arguments.get("Sequence number", arguments.get("sequence number"))),
            1 if forward_thread > 0 else 0,
            message,
            call,
        )
    )


def _times(event: dict[str, object], rows: _Rows) -> tuple[int, int] | None:
    """(start, end) in ns; None where they are missing or cannot be."""
    start, length = event.get("ts"), event.get("dur")
    if length is None:
        rows.dropped["no duration: they did not end"] += 1
        return None
    if not _is_number(start) or not _is_number(length):
        rows.dropped["times that are no numbers"] += 1
        return None
    assert isinstance(start, int | float) and isinstance(length, int | float)
    if not abs(start) < MOST_US or not abs(length) < MOST_LENGTH_US:
        rows.dropped["times beyond any clock"] += 1
        return None
    if length < 0:
        rows.dropped["a negative duration"] += 1
        return None
    start_ns = nanoseconds_of_microseconds(start)
    return start_ns, start_ns + nanoseconds_of_microseconds(length)


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (isinstance(value, int) or math.isfinite(value))
    )


def _span(event: dict[str, object], rows: _Rows) -> None:
    times = _times(event, rows)
    if times is not None and times[1] > times[0]:
        first, last = rows.span_ns or times
        rows.span_ns = min(first, times[0]), max(last, times[1])


def _label(event: dict[str, object], rows: _Rows) -> None:
    arguments = event.get("args")
    if event.get("name") in ("process_name", "process_labels", "thread_name") and isinstance(arguments, dict):
        text = str(arguments.get("name", arguments.get("labels", "")))[:200]
        if text and len(rows.labels) < 5_000:
            rows.labels.append(text)


def _recording(
    path: Path, rows: _Rows, head: dict[str, object], cut: Cut | None, other: list[dict[str, object]]
) -> Recording:
    """What was gathered, with what is doubtful about it in words."""
    warnings, ignored = [], []
    if cut is not None:
        warnings.append(
            f"{path.name}: line {cut.line}: {cut.reason}, before the JSON does: {rows.events:,} whole events are read"
        )
    for reason, count in sorted(rows.dropped.items()):
        ignored.append(f"{path.name}: {counted(count, 'event')} with {reason}")
    if other:
        tool = tool_of(head, other, rows.labels)
        ignored.append(f"{path.name}: events of no category of the profiler{f': {tool}' if tool else ''}")
    work, twice = work_of(rows.work, rows.names)
    host, also_twice = host_of(rows.host)
    if twice + also_twice:
        warnings.append(f"{path.name}: {counted(twice + also_twice, 'event')} stand twice and are counted once")
    work, outside = _on_clock(work, host)
    if outside:
        warnings.append(
            f"{path.name}: {counted(outside, 'event')} of the device are a minute off the host's clock: left out"
        )
    info = _values(head.get("distributedInfo"))
    rank, world, doubt = _rank(info, rows, path)
    warnings += doubt
    on_cpu = not len(work) and not _uses_device(head, rows, info)
    return Recording(
        source="kineto",
        file=path.name,
        rank=rank,
        world_size=world,
        device_name=_device_name(head, work, rows),
        on_cpu=on_cpu,
        names=tuple(rows.names.values),
        streams=tuple(rows.streams.values),
        threads=tuple(rows.threads.values),
        messages=tuple(rows.messages.values),
        calls=tuple(rows.calls.values),
        work=work,
        host=host,
        span_ns=rows.span_ns,
        ignored=tuple(ignored),
        warnings=tuple(warnings),
    )


def _on_clock(work: Work, host: Host) -> tuple[Work, int]:
    """The device's rows within a minute of the host's."""
    if not len(work) or not len(host):
        return work, 0
    first_ns, last_ns = int(host.start_ns.min()) - _SLACK_NS, int(host.end_ns.max()) + _SLACK_NS
    keep = (work.start_ns >= first_ns) & (work.end_ns <= last_ns)
    return (work if keep.all() else chosen_work(work, keep)), int((~keep).sum())


def _values(value: object) -> object:
    """A value of the head; some versions write it as the text of a Python value."""
    if isinstance(value, str) and value[:1] in "{[":
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    return value


def _rank(info: object, rows: _Rows, path: Path) -> tuple[int | None, int | None, list[str]]:
    """(rank, ranks in the job, what is doubtful about it)."""
    named = _RANK_IN_NAME.search(path.name)
    of_name = int(named[1]) if named else None
    if isinstance(info, dict):
        rank, world = integer(info.get("rank")), integer(info.get("world_size"))
        doubts = []
        if rank >= 0 and world > 0 and rank >= world:
            doubts.append(f"{path.name}: distributedInfo says rank {rank} of {world}")
        if rank >= 0 and of_name is not None and of_name != rank:
            doubts.append(f"{path.name}: the file is called rank {of_name}, distributedInfo in it says {rank}")
        if rank >= 0:
            return rank, world if world > 0 else None, doubts
    missing = f"{path.name}: no distributedInfo (the job had no process group, or an old version wrote the file)"
    labelled = next((int(match[1]) for label in rows.labels if (match := _RANK_IN_NAME.search(label))), None)
    found = of_name if of_name is not None else labelled
    where = "by the file's name" if of_name is not None else "by the label of its process"
    return found, None, [missing + (f": rank {found} {where}" if found is not None else ": its rank is unknown")]


def _uses_device(head: dict[str, object], rows: _Rows, info: object) -> bool:
    """Whether the job ran on GPUs, so that a file without their work lacks a part."""
    if isinstance(info, dict) and info.get("backend") == "gloo":
        return False
    if _values(head.get("deviceProperties")) or any(message.group == NCCL for message in rows.messages.values):
        return True
    launches = re.compile(r"^(cuda|hip|cu)[A-Z]\w*|^nccl[:A-Z]")
    return any(launches.match(name) for name in rows.names.values)


def _device_name(head: dict[str, object], work: Work, rows: _Rows) -> str:
    """Of the device that has the most work, as the driver calls it."""
    properties = _values(head.get("deviceProperties"))
    if not isinstance(properties, list):
        return ""
    names = {integer(item.get("id")): str(item.get("name", ""))[:80] for item in properties if isinstance(item, dict)}
    if not len(work):
        return names.get(0, "")
    devices = np.array([stream.device for stream in rows.streams.values], np.int64)[work.stream]
    values, counts = np.unique(devices, return_counts=True)
    return names.get(int(values[counts.argmax()]), "")
