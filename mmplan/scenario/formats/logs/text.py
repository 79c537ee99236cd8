"""The lines of a log, whatever state it is in: cut, glued, with progress bars, with bytes that are no text."""

import gzip
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.formats.reading import without_terminal_codes
from mmplan.scenario.text_bytes import open_text, refuse_bomb

MAX_BYTES = 1_000_000_000
MAX_CHARACTERS = 10_000  # of a line: what stands behind is dropped


def read_log_lines(path: Path) -> Iterator[str]:
    """Lines one after the other; each state of a progress bar is one. The end of a damaged gzip is the end of the log.

    Raises:
        InputError: the file cannot be read, has more than 1 GB, or unpacks to more than 200 times its size.
    """
    try:
        with open_text(path) as file:
            for raw in _pieces(file, path):
                for text in raw.decode("utf-8-sig", errors="replace").split("\r"):
                    yield without_terminal_codes(text)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return
    except FileNotFoundError as error:
        raise InputError("no such file", file=path) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot be read: {reason}", file=path) from error


def _pieces(file: BufferedReader, path: Path) -> Iterator[bytes]:
    """Lines without their ends, long ones cut."""
    read, size_bytes = 0, path.stat().st_size
    whole = True
    while raw := file.readline(MAX_CHARACTERS):
        read += len(raw)
        if read > MAX_BYTES:
            raise InputError(f"has more than {MAX_BYTES:,} bytes", file=path)
        refuse_bomb(path, read, size_bytes)
        if whole:
            yield raw.rstrip(b"\n").rstrip(b"\r")
        whole = raw.endswith(b"\n")
