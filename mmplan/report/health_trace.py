"""Readings that fired as marks on the timeline of their run, in the file that `mmplan execute --trace` wrote.

Traces count from the start of their first step; `otherData.started_s` says when that was, in seconds since 1970. Traces
of torch.profiler say so in `baseTimeNanoseconds`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmplan.errors import InputError
from mmplan.files import write_file
from mmplan.runtime.health.readings import Reading
from mmplan.units import microseconds, seconds_of_nanoseconds

_TRACK = 9  # of a rank, behind those of the run
_CATEGORY = "health"


def add_to_trace(readings: Sequence[Reading], path: Path) -> None:
    """Mark what fired; marks of an earlier call are replaced.

    Raises:
        InputError: the file is no trace, or does not say when it began.
    """
    try:
        document = json.loads(path.read_text())
        events = [e for e in document["traceEvents"] if e.get("cat") != _CATEGORY]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            "expected a trace with `traceEvents`, as `mmplan execute --trace` writes", file=path
        ) from error
    began_s = _began_s(document)
    if began_s is None:
        raise InputError("the trace does not say when it began", file=path, key="otherData.started_s")
    fired = [reading for reading in readings if reading.fired]
    for rank in sorted({reading.rank for reading in fired}):
        name = {"name": "thread_name", "ph": "M", "pid": rank, "tid": _TRACK, "args": {"name": "health"}}
        events.append({**name, "cat": _CATEGORY})
    events += [_mark(reading, began_s) for reading in fired]
    write_file(path, json.dumps({**document, "traceEvents": events}))


def _mark(reading: Reading, began_s: float) -> dict[str, Any]:
    args = {"step": reading.step, "value": reading.value, "limit": reading.limit, **reading.detail}
    return {
        "name": f"{reading.monitor}: {reading.of}",
        "cat": _CATEGORY,
        "ph": "i",
        "s": "p",
        "pid": reading.rank,
        "tid": _TRACK,
        "ts": microseconds(reading.time_s - began_s),
        "args": args,
    }


def _began_s(document: dict[str, Any]) -> float | None:
    other = document.get("otherData")
    started_s = other.get("started_s") if isinstance(other, dict) else None
    if isinstance(started_s, int | float):
        return float(started_s)
    base_ns = document.get("baseTimeNanoseconds")
    return seconds_of_nanoseconds(float(base_ns)) if isinstance(base_ns, int | float) else None
