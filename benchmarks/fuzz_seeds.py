"""Seeds for `fuzz_importers.py`: real files, in pieces small enough for many mutants a second.

A trace of 1 MB is read in a second and has one mutant in that time; its first events and some from elsewhere go
through the same code. JSON stays JSON: long arrays lose elements from their middle. Other text keeps its beginning,
where titles and arguments are, and a stretch from further on. Tables of Nsight are made of the statements that describe
them.
"""

import gzip
import json
import random
import sqlite3
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_BYTES = 40_000
PIECES = 6  # of each file that is larger


@dataclass(frozen=True, slots=True)
class Seed:
    """A file as it goes into the fuzzer; `whole`: nothing of it was left out."""

    name: str
    content: bytes
    packed: bool
    whole: bool

    @property
    def text(self) -> str | None:
        """None of a binary file."""
        try:
            return self.content.decode("utf-8-sig")
        except UnicodeDecodeError:
            return None


def seeds_of(folder: Path) -> list[Seed]:
    """Of every file of a folder, in the order of their names."""
    found: list[Seed] = []
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        content = path.read_bytes()
        packed = content[:2] == b"\x1f\x8b"
        content = gzip.decompress(content) if packed else content
        if path.suffix == ".sql":
            found.append(Seed(f"{path.stem}.sqlite", _database(content.decode()), False, True))
        if len(content) <= MOST_BYTES:
            found.append(Seed(path.name, content, packed, True))
            continue
        pieces = {_piece(content.decode(errors="replace"), random.Random(at)) for at in range(PIECES)}
        found += [Seed(path.name, piece.encode(errors="replace"), packed, False) for piece in sorted(pieces)]
    return found


def _piece(text: str, draw: random.Random) -> str:
    if text.lstrip()[:1] in ("{", "["):
        try:
            return _json_piece(json.loads(text, strict=False), draw)
        except (ValueError, RecursionError):
            pass
    lines = text.splitlines(keepends=True)
    head, size = [], 0
    while lines and size < MOST_BYTES // 2:
        size += len(lines[0])
        head.append(lines.pop(0)[: MOST_BYTES // 4])
    start = draw.randrange(max(1, len(lines)))
    rest, size = [], 0
    for line in lines[start:]:
        if size > MOST_BYTES // 2:
            break
        size += len(line)
        rest.append(line[: MOST_BYTES // 4])
    return "".join(head + rest)


def _json_piece(value: Any, draw: random.Random) -> str:
    """With so few elements of every array that the whole is small enough."""
    for most in (400, 200, 100, 50, 20, 10, 4):
        text = json.dumps(_cut(value, most, draw.random()), ensure_ascii=False)
        if len(text) <= MOST_BYTES:
            break
    return text


def _cut(value: Any, most: int, where: float) -> Any:
    if isinstance(value, dict):
        return {key: _cut(item, most, where) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > most:
        half = most // 2
        start = half + int(where * (len(value) - most))
        value = value[:half] + value[start : start + half]
    return [_cut(item, most, where) for item in value]


def _database(statements: str) -> bytes:
    """A file of SQLite with these tables, each with rows of whole numbers that ascend, and a name for each number."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.sqlite"
        with sqlite3.connect(path) as connection:
            connection.executescript(statements)
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            for (table,) in tables:
                columns = connection.execute(f'PRAGMA table_info("{table}")').fetchall()
                for row in range(12):
                    values = [_value(column[1], row) for column in columns]
                    places = ", ".join("?" * len(values))
                    connection.execute(f'INSERT OR IGNORE INTO "{table}" VALUES ({places})', values)
        connection.close()
        return path.read_bytes()


def _value(column: str, row: int) -> object:
    name = column.lower()
    if name == "value":
        return f"ampere_gemm_{row}"
    if name in ("start", "end"):
        return 1_000_000 * row + (700_000 if name == "end" else 0)
    return row
