"""An SQLite file of unknown origin, read and never trusted: read-only, no functions, no views, no other files.

The file is opened immutable, so that no journal beside it is replayed and nothing is written; statements are ours
alone, an authoriser allows them to read columns and nothing else, and a counter stops what runs for too long.
"""

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from mmplan.errors import InputError

MAGIC = b"SQLite format 3\x00"
MOST_VALUE_BYTES = 1_000_000
_STEPS_PER_CHECK = 1_000_000
_MOST_CHECKS = 20_000  # virtual machine steps: about ten minutes

_VERSIONED = re.compile(r"(\w{1,100})_V(\d{1,4})", re.IGNORECASE)
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_PRAGMA}
_PRAGMAS = {"table_info", "trusted_schema", "query_only", "cell_size_check"}


class Database:
    """Tables by name, in the file's own spelling; only real tables are there."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self._connection = path, connection
        rows = self._run("SELECT type, name, sql FROM sqlite_master WHERE type IN ('table', 'view') LIMIT 5000")
        self._hostile = {str(name): kind for kind, name, sql in rows if kind == "view" or _is_virtual(sql)}
        self.tables = {str(name): self._columns(str(name)) for _, name, _ in rows if str(name) not in self._hostile}
        # some exports number the version of a table's columns behind its name
        versions = sorted(
            (int(match[2]), match[1], match[0]) for match in map(_VERSIONED.fullmatch, self.tables) if match
        )
        self._own = {plain: name for _, plain, name in versions if plain not in self.tables}

    def rows(self, table: str, wanted: Sequence[str]) -> Iterator[tuple[object, ...]]:
        """The wanted columns of each row, None where the table lacks a column; nothing where there is no such table.

        Raises:
            InputError: the table is a view or virtual, or the file is damaged.
        """
        table = self._own.get(table, table)
        if table in self._hostile:
            raise InputError(f"'{table}' is a view or virtual: a profiler writes plain tables", file=self.path)
        known = {column.lower(): column for column in self.tables.get(table, ())}
        if not known:
            return
        listed = ", ".join(_quoted(known[name.lower()]) if name.lower() in known else "NULL" for name in wanted)
        try:
            yield from self._connection.execute(f"SELECT {listed} FROM {_quoted(table)}")
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            raise _refusal(self.path, error) from error

    def __contains__(self, table: str) -> bool:
        return table in self.tables or table in self._own or table in self._hostile

    def has(self, table: str, *columns: str) -> bool:
        """Whether the table has all these columns."""
        known = self.tables.get(self._own.get(table, table), ())
        return {column.lower() for column in columns} <= {column.lower() for column in known}

    def _columns(self, table: str) -> tuple[str, ...]:
        return tuple(str(row[1]) for row in self._run(f"PRAGMA table_info({_quoted(table)})"))

    def _run(self, statement: str) -> list[tuple[object, ...]]:
        try:
            return self._connection.execute(statement).fetchall()
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            raise _refusal(self.path, error) from error


@contextmanager
def opened_database(path: Path) -> Iterator[Database]:
    """The database in a file.

    Raises:
        InputError: cannot be read, is no SQLite file, is damaged.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
    except FileNotFoundError as error:
        raise InputError("no such file", file=path) from error
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}", file=path) from error
    if head != MAGIC:
        raise InputError(f"expected an SQLite file, found one that begins with {head[:8]!r}", file=path)
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)
    except sqlite3.Error as error:
        raise _refusal(path, error) from error
    with closing(connection):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
        checks = iter(range(_MOST_CHECKS))
        connection.set_progress_handler(lambda: next(checks, None) is None, _STEPS_PER_CHECK)
        connection.set_authorizer(_authorise)
        for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON"):
            try:
                connection.execute(f"PRAGMA {pragma}")
            except sqlite3.Error as error:
                raise _refusal(path, error) from error
        yield Database(path, connection)


def _authorise(action: int, first: str | None, second: str | None, database: str | None, source: str | None) -> int:
    allowed = action in _ALLOWED and (action != sqlite3.SQLITE_PRAGMA or first in _PRAGMAS)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _is_virtual(sql: object) -> bool:
    return str(sql).lstrip().upper().startswith("CREATE VIRTUAL")


def _refusal(path: Path, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[:200]
    if "interrupted" in reason:
        return InputError("reading takes longer than ten minutes: a trap, or too large", file=path)
    return InputError(f"a damaged or hostile SQLite file: {reason}", file=path)
