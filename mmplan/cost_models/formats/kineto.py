"""Traces of the PyTorch profiler (Kineto, Chrome JSON): one file of one process, event by event into a recording.

Times are microseconds in every version, whole or with a fraction, whatever `displayTimeUnit` says; the clock starts
anywhere. Category names differ between versions (`Kernel`, `kernel`; `Operator`, `cpu_op`; `Runtime`, `cuda_runtime`).
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from mmplan.cost_models.formats.json_stream import Broken, Cut, json_items
from mmplan.cost_models.formats.kineto_arguments import call_of, integer, message_of
from mmplan.cost_models.formats.kineto_head import HEAD_KEYS, device_names, rank_of, uses_device
from mmplan.cost_models.formats.look_alikes import tool_of
from mmplan.cost_models.traces.gathering import BY_NAME, LONGEST_NAME, MOST_DISTINCT, Gathered, Times
from mmplan.cost_models.traces.kernel_classes import CLASS_INDEX, MEMCPY, MEMSET
from mmplan.cost_models.traces.recording import CALL, MARK, OPERATOR, PYTHON, Recording, Stream
from mmplan.errors import InputError
from mmplan.scenario.document import counted
from mmplan.units import nanoseconds_of_microseconds

_DEVICE_KIND = {
    **dict.fromkeys(("kernel", "concurrent_kernel"), BY_NAME),
    **dict.fromkeys(("gpu_memcpy", "memcpy"), CLASS_INDEX[MEMCPY]),
    **dict.fromkeys(("gpu_memset", "memset"), CLASS_INDEX[MEMSET]),
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
_WITHOUT_TIMES = ("M", "s", "f", "t", "i", "I", "C")  # labels, arrows, moments, counters
_LEGACY = {"CPU functions": "operator", "CUDA functions": "kernel"}  # torch.autograd.profiler's own export

MOST_US, MOST_LENGTH_US = 4.6e15, 1e12  # the year 2115 on a Unix clock; eleven days
MOST_EVENTS = 40_000_000
_CHECK_EVERY = 1_000
_MOST_OTHERS, _MOST_LABELS, _MOST_KEYS = 2_000, 5_000, 1_000


@dataclass(slots=True)
class _Rows:
    """What has been read so far. `others`: categories that are none of the profiler's, and whether XLA's words stand in
    the arguments."""

    gathered: Gathered = field(default_factory=Gathered)
    labels: list[str] = field(default_factory=list)
    others: set[tuple[str, bool]] = field(default_factory=set)
    span_ns: Times | None = None
    events: int = 0


def read_recording(path: Path) -> Recording:
    """The recording of one file, plain or gzip.

    Raises:
        InputError: cannot be read, is no JSON, is another tool's trace, holds no event of the profiler.
    """
    rows, head, cut = _Rows(), dict[str, object](), None
    for key, value in json_items(path, ("traceEvents",)):
        if isinstance(value, Cut):
            cut = value
        elif isinstance(value, Broken):
            rows.gathered.drop("no JSON")
        elif key not in ("traceEvents", ""):
            if len(head) < _MOST_KEYS:
                head[key] = value if key in HEAD_KEYS else None
        elif not isinstance(value, dict):
            rows.gathered.drop("no object")
        elif not _add(value, rows) and len(rows.others) < _MOST_OTHERS:
            rows.others.add((str(value.get("cat"))[:40], "hlo" in str(value.get("args"))[:2_000]))
        if rows.events % _CHECK_EVERY == 0 and (rows.events > MOST_EVENTS or rows.gathered.distinct > MOST_DISTINCT):
            most = f"{MOST_EVENTS:,} events or {MOST_DISTINCT:,} different names, threads and sizes"
            raise InputError(f"more than {most}: profile fewer steps", file=path)
    tool = tool_of(head, rows.others, rows.labels)
    if not len(rows.gathered.work) and not len(rows.gathered.host):
        dropped = "".join(f"; {counted(n, 'event')} with {why}" for why, n in rows.gathered.dropped.most_common(1))
        message = f"no event of the PyTorch profiler in it{f': {tool}' if tool else dropped}"
        raise InputError(message, file=path, line=cut.line if cut else None)
    warnings, ignored = list[str](), list[str]()
    if cut is not None:
        end = f"line {cut.line}: {cut.reason}, before the JSON does"
        warnings.append(f"{path.name}: {end}: {rows.events:,} whole events are read")
    if rows.others:
        ignored.append(f"{path.name}: events of no category of the profiler{f': {tool}' if tool else ''}")
    rank, world, doubts = rank_of(head, rows.labels, path)
    return rows.gathered.recording(
        "kineto",
        path.name,
        rank=rank,
        world_size=world,
        device_names=device_names(head),
        on_cpu=not uses_device(head, rows.gathered),
        span_ns=rows.span_ns,
        warnings=(*warnings, *doubts),
        ignored=tuple(ignored),
    )


def _add(event: dict[str, object], rows: _Rows) -> bool:
    """Take an event; False where it is none of the profiler's."""
    rows.events += 1
    phase, category = event.get("ph"), event.get("cat")
    known = category.lower() if isinstance(category, str) else None
    if phase != "X":
        if phase == "M":
            _label(event, rows)
        return phase in _WITHOUT_TIMES and (known is None or known in _REPEATS)
    process = event.get("pid")
    if known is None and isinstance(process, str):
        known = _LEGACY.get(process)
    if known in _REPEATS:
        if known == "trace":
            _span(event, rows)
        return True
    kind, device_kind = _HOST_KIND.get(known or ""), _DEVICE_KIND.get(known or "")
    if kind is None and device_kind is None:
        if known is not None:
            rows.gathered.drop(f"category '{known[:40]}'")
        return False
    times = _times(event, rows.gathered)
    if times is None:
        return True
    name = event.get("name")
    text = name[:LONGEST_NAME] if isinstance(name, str) else str(name)[:100]
    values = event.get("args")
    arguments = values if isinstance(values, dict) else {}
    if device_kind is not None:
        _add_work(event, text, device_kind, times, arguments, rows.gathered)
    elif kind is not None:
        _add_host(event, text, kind, times, arguments, rows.gathered)
    return True


def _add_work(
    event: dict[str, object], name: str, kind: int, times: Times, arguments: dict[str, object], gathered: Gathered
) -> None:
    device = integer(arguments.get("device", event.get("pid")))
    gathered.add_work(
        times,
        Stream(max(device, 0), str(arguments.get("stream", event.get("tid")))[:40]),
        name,
        kind,
        correlation=_id(arguments.get("correlation")),
        external=_id(arguments.get("External id", arguments.get("external id"))),
        size_bytes=integer(arguments.get("bytes", arguments.get("size"))),
        message=message_of(name, arguments) if kind == BY_NAME and gathered.is_message(name) else None,
    )


def _add_host(
    event: dict[str, object], name: str, kind: int, times: Times, arguments: dict[str, object], gathered: Gathered
) -> None:
    if kind == OPERATOR and name.startswith("ProfilerStep"):
        kind = MARK
    says_message = kind == MARK or (kind == OPERATOR and name == "record_param_comms")
    gathered.add_host(
        times,
        f"{event.get('pid')}/{event.get('tid')}"[:80],
        name,
        kind,
        correlation=_id(arguments.get("correlation")),
        external=_id(arguments.get("External id", arguments.get("external id"))),
        sequence=integer(arguments.get("Sequence number", arguments.get("sequence number"))),
        backward=integer(arguments.get("Fwd thread id")) > 0,
        message=message_of(name, arguments) if says_message else None,
        call=call_of(name, arguments) if kind == OPERATOR else None,
    )


def _id(value: object) -> int:
    """An id; CUPTI and roctracer write 0 for none."""
    return integer(value) or -1


def _times(event: dict[str, object], gathered: Gathered) -> Times | None:
    """(start, end) in ns; None where they are missing or cannot be."""
    start, length = event.get("ts"), event.get("dur")
    if length is None:
        gathered.drop("no duration: they did not end")
        return None
    if not _is_number(start) or not _is_number(length):
        gathered.drop("times that are no numbers")
        return None
    assert isinstance(start, int | float) and isinstance(length, int | float)
    if not abs(start) < MOST_US or not abs(length) < MOST_LENGTH_US:
        gathered.drop("times beyond any clock")
        return None
    if length < 0:
        gathered.drop("a negative duration")
        return None
    start_ns = nanoseconds_of_microseconds(start)
    return start_ns, start_ns + nanoseconds_of_microseconds(length)


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and (
        isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    )


def _span(event: dict[str, object], rows: _Rows) -> None:
    times = _times(event, rows.gathered)
    if times is not None and times[1] > times[0]:
        first, last = rows.span_ns or times
        rows.span_ns = min(first, times[0]), max(last, times[1])


def _label(event: dict[str, object], rows: _Rows) -> None:
    arguments = event.get("args")
    if event.get("name") in ("process_name", "process_labels", "thread_name") and isinstance(arguments, dict):
        text = str(arguments.get("name", arguments.get("labels", "")))[:200]
        if text and len(rows.labels) < _MOST_LABELS:
            rows.labels.append(text)
