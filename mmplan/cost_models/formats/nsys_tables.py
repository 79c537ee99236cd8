"""Tables that `nsys stats` prints (CSV, or columns under a line of dashes) and nvprof's CSV, several in one file.

A section begins where a line names known columns; what stands before it (`Processing [x.sqlite]...`) is no part of it.
Units stand in the headings (`Total Time (ns)`) or, for nvprof, in the line below.
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.formats.reading import read_lines

_HEADING = re.compile(r"^(.*?)\s*(?:\(([A-Za-z%]+)\)|\[([A-Za-z%]+)\])?$")
_DASHES = re.compile(r"^\s*-{2,}(?:\s+-{2,}){2,}\s*$")
_SKIPPED = re.compile(r"^\s*SKIPPED:\s*(.*)")
_NAMES = ("name", "operation", "range", "nvtx range", "kernel name")
_TOTALS = ("total time", "total proj time", "time", "duration", "total")
_COUNTS = ("instances", "num calls", "count", "range instances", "calls", "kern inst", "range inst")
_MOST_ROWS = 2_000_000


@dataclass(frozen=True, slots=True)
class Column:
    """A heading in lower case and the unit in its brackets, empty where there is none."""

    name: str
    unit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One table: headings, and rows of cells with their line. `skipped`: what nsys says instead of a table."""

    line: int
    columns: tuple[Column, ...]
    rows: tuple[tuple[int, tuple[str, ...]], ...]
    skipped: str = ""

    def index(self, *names: str) -> int | None:
        """Position of the first of these headings, None where none is there."""
        own = [column.name for column in self.columns]
        return next((own.index(name) for name in names if name in own), None)


def sections(path: Path) -> Iterator[Section]:
    """The tables of a file, in order.

    Raises:
        InputError: cannot be read, a row with too few or too many cells.
    """
    columns: tuple[Column, ...] = ()
    spans: list[tuple[int, int]] = []
    rows: list[tuple[int, tuple[str, ...]]] = []
    line, before, number = 0, "", 0
    for number, text in enumerate(read_lines(path), 1):
        skipped = _SKIPPED.match(text)
        if skipped:
            yield Section(line=number, columns=(), rows=(), skipped=skipped[1][:200])
        elif _DASHES.match(text) and before.strip():
            if columns:
                yield Section(line=line, columns=columns, rows=tuple(rows))
            spans = [match.span() for match in re.finditer(r"-+", text)]
            columns, rows, line = _columns(_sliced(before, spans)), [], number - 1
        elif not spans and (found := _heading(text)):
            if columns:
                yield Section(line=line, columns=columns, rows=tuple(rows))
            columns, rows, line = found, [], number
        elif not text.strip():
            if columns and (rows or spans):
                yield Section(line=line, columns=columns, rows=tuple(rows))
                columns, rows, spans = (), [], []
        elif columns:
            cells = _sliced(text, spans) if spans else _cells(text, len(columns))
            if spans or len(cells) == len(columns):
                rows.append((number, tuple(cells)))
            elif _is_row(text):
                message = f"{len(cells)} cells, the heading in line {line} has {len(columns)}"
                raise InputError(message, file=path, line=number)
            if len(rows) > _MOST_ROWS:
                raise InputError(f"more than {_MOST_ROWS:,} rows", file=path, line=number)
        before = text
    if columns:
        yield Section(line=line, columns=columns, rows=tuple(rows))


def _heading(text: str) -> tuple[Column, ...]:
    """The columns that a CSV line names, empty where it is no heading of ours."""
    if "," not in text or len(text) > 2_000:
        return ()
    columns = _columns(_split(text))
    names = {column.name for column in columns}
    return columns if names & set(_NAMES) and names & set(_TOTALS) else ()


def _columns(headings: list[str]) -> tuple[Column, ...]:
    found = []
    for heading in headings:
        match = _HEADING.match(" ".join(heading.split()).lower())
        name, unit = (match[1], match[2] or match[3] or "") if match else (heading.lower(), "")
        found.append(Column(re.sub(r"^time ?\(?%?\)?$", "share", name) if unit == "%" or "%" in name else name, unit))
    return tuple(found)


def _cells(text: str, count: int) -> list[str]:
    """Cells of a CSV line; a last cell whose commas were not quoted is put together again."""
    cells = _split(text)
    if len(cells) > count:
        cells = [*cells[: count - 1], ",".join(cells[count - 1 :])]
    return [cell.strip() for cell in cells]


def _split(text: str) -> list[str]:
    """Cells of a CSV line, none where it is no CSV (a lone carriage return in it)."""
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return []


def _is_row(text: str) -> bool:
    return text.lstrip()[:1].isdigit() or text.lstrip().startswith('"')


def _sliced(text: str, spans: list[tuple[int, int]]) -> list[str]:
    """Cells between lines of dashes; the last one goes on to the end."""
    ends = [*(end for _, end in spans[:-1]), len(text)]
    starts = [0, *(end for _, end in spans[:-1])]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def number_of(text: str) -> float | None:
    """1234.5 of `1,234.5`; None for what is no finite number that is not negative."""
    try:
        value = float(text.replace(",", "").replace("_", "x"))
    except ValueError:
        return None
    return value if 0 <= value < 1e18 else None
