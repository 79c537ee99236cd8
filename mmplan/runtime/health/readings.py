"""Readings of monitors as JSON lines: a header, then one object a reading. Imports no torch.

A process writes a file of its own: `health.jsonl` of rank 0, `health.rank3.jsonl` of rank 3.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from pydantic import TypeAdapter, ValidationError

from mmplan.errors import InputError
from mmplan.scenario.document import read_text

SCHEMA = "mmplan.health/1"
MAX_BYTES = 1_000_000_000

BEGAN = "began"  # in a detail: the step at which this began, where a monitor can tell


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a monitor saw in one step. `of`: the module, modality or parameter it is about; `value` is None where it was
    no number; `time_s`: since 1970, by this host; `beyond` the limit; `fired`: so often in a row as its rule asks."""

    step: int
    time_s: float
    rank: int
    monitor: str
    of: str
    value: float | None
    limit: float
    beyond: bool
    fired: bool
    detail: dict[str, float | str | None] = field(default_factory=dict)


_READING = TypeAdapter(Reading)


def rank_file(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def write_header(file: TextIO, facts: Mapping[str, Any]) -> None:
    file.write(json.dumps({"schema": SCHEMA, **facts}) + "\n")


def write_readings(file: TextIO, readings: Iterable[Reading]) -> None:
    """At once, so that what was seen last before a crash is there."""
    for reading in readings:
        file.write(_READING.dump_json(reading).decode() + "\n")
    file.flush()


def finite_or_none(value: float) -> float | None:
    """JSON has no infinities."""
    return value if math.isfinite(value) else None


def load_readings(path: Path) -> tuple[Reading, ...]:
    """The readings of all ranks of a run, by step.

    Args:
        path: the file of rank 0; those of other ranks lie beside it.

    Raises:
        InputError: a file is missing or damaged; a last line that was cut off is left out.
    """
    found = list(_read(path))
    for other in sorted(path.parent.glob(f"{path.stem}.rank*{path.suffix}")):
        found += _read(other)
    return tuple(sorted(found, key=lambda reading: (reading.step, reading.time_s)))


def load_silent(path: Path) -> dict[str, str]:
    """Monitors that could take no reading, and why, as the header of a file that `load_readings` has read says."""
    with path.open(encoding="utf-8") as file:
        told = json.loads(file.readline()).get("silent")
    return {str(name): str(why) for name, why in told.items()} if isinstance(told, dict) else {}


def _read(path: Path) -> Iterable[Reading]:
    lines = read_text(path, "health file", MAX_BYTES).split("\n")
    if not _is_header(lines[0]):
        raise InputError(f'expected a first line with "schema": "{SCHEMA}"', file=path, line=1)
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            yield _READING.validate_json(line)
        except ValidationError as error:
            if number == len(lines):  # the process ended while it wrote
                return
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"]) or None
            raise InputError(f"not a reading: {first['msg']}", file=path, line=number, key=key) from error


def _is_header(line: str) -> bool:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(header, dict) and header.get("schema") == SCHEMA
