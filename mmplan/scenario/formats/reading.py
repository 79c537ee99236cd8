"""What an importer found in files that someone already has, and how such files are read without trusting them.

Importers are functions of paths: they give a `Reading`, or one sentence with file and line on why the file is not what
it looks like. Nothing in a file is executed, followed or expanded.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.text_bytes import encoding_of, open_text, refuse_packed

HEAD_BYTES = 65_536
MORE_BYTES = 2_000_000  # where the first ones show nothing: logs may begin with much else
MAX_TEXT_BYTES = 64_000_000
MAX_LINE_CHARACTERS = 100_000

_ANSI = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]"  # what YAML does not allow either
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The part of a scenario that a file gives, and what became of everything else in it.

    Attributes:
        kind: as `mmplan import` names it.
        fragment: keys of a scenario file, or of the `document` that is written instead of one, as YAML values.
        document: what `fragment` is: a part of a scenario, a scenario, a profile for `cluster.profile`, or a record.
        read: what was taken, a sentence each, with the numbers.
        ignored: what was not taken, and why.
        warnings: what looks wrong or will be misread by others.
    """

    kind: str
    fragment: Mapping[str, object]
    document: str = "part of a scenario"
    read: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


UNKNOWN_DEVICE = "no file names a device of the catalogue: write cluster.device"


def device_told_once(warnings: Iterable[str]) -> tuple[str, ...]:
    """Warnings without repetitions; the general one on the device goes where another says more."""
    kept = dict.fromkeys(warnings)
    more = ("the device is not known", "no file says which GPU", "mmplan knows no MetaX device")
    if any(text.startswith(more) for text in kept):
        kept.pop(UNKNOWN_DEVICE, None)
    return tuple(kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The beginning of a file, from which its kind is guessed: text with terminal codes taken out."""

    path: Path
    text: str
    whole: bool = field(default=False)  # the text is all of the file


def read_head(path: Path, most_bytes: int = HEAD_BYTES) -> Head:
    """The first 64 KB (or `most_bytes`), unpacked where it is gzip; bytes that are no text become other characters.

    Raises:
        InputError: the file cannot be read, or is an archive.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes)
    except FileNotFoundError as error:
        raise InputError("no such file", file=path) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot be read: {reason}", file=path) from error
    refuse_packed(path, content)
    whole = len(content) < most_bytes
    if content[:2] == b"\x1f\x8b":
        unpack = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            content = unpack.decompress(content, most_bytes)
        except zlib.error as error:
            raise InputError(f"a damaged gzip file: {error}", file=path) from error
        whole = whole and unpack.eof
    text = content.decode(encoding_of(content), errors="replace")
    return Head(path=path, text=without_terminal_codes(text), whole=whole)


def read_lines(path: Path, most_bytes: int = MAX_TEXT_BYTES) -> Iterator[str]:
    """The lines of a text file or of a gzip of one, one after the other, without line ends and terminal codes.

    Raises:
        InputError: the file cannot be read, is larger than `most_bytes` once unpacked, is binary, or has a line of more
            than 100,000 characters.
    """
    read = 0
    try:
        with open_text(path) as file:
            number = 0
            while raw := file.readline(MAX_LINE_CHARACTERS + 1):
                number += 1
                read += len(raw)
                if read > most_bytes:
                    raise InputError(f"has more than {most_bytes:,} bytes", file=path, line=number)
                if len(raw) > MAX_LINE_CHARACTERS:
                    raise InputError(f"a line of more than {MAX_LINE_CHARACTERS:,} bytes", file=path, line=number)
                if b"\x00" in raw:
                    raise InputError("expected text, found a binary file", file=path, line=number)
                yield without_terminal_codes(raw.decode("utf-8-sig", errors="replace").rstrip("\r\n"))
    except FileNotFoundError as error:
        raise InputError("no such file", file=path) from error
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot be read: {reason}", file=path) from error


def without_terminal_codes(text: str) -> str:
    """Text without colours, cursor moves and control characters; tabs and line ends stay."""
    return _ANSI.sub("", text)
