"""A JSON file of any size, read item by item: the values of its outer object, and each element of the arrays that are
named.

Profilers write one array of millions of small objects. It never is in memory as a whole, its text neither. A file that
ends early (a killed job, an array that its writer never closed) gives its whole items and then a `Cut`.
"""

import json
import re
import zlib
from codecs import getincrementaldecoder
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.text_bytes import MOST_PACKING, UNSUSPICIOUS_BYTES, open_text

MOST_FILE_BYTES = 16_000_000_000  # unpacked: an hour of reading
MOST_ITEM_CHARACTERS = 16_000_000
MOST_BROKEN_ITEMS = 1_000
_CHUNK_BYTES = 1 << 20

_DECODER = json.JSONDecoder(strict=False)  # control characters in strings: kernel names from debuggers have them
_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[, \t\r\n]*")
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
# What printf writes for floats that JSON does not know, and escapes it does not know (Windows paths).
_BAD_NUMBER = re.compile(r"(?<=[:,\[])(\s*)[+-]?(?:nan|inf|infinity)(?:\(ind\))?(?=\s*[,}\]])", re.IGNORECASE)
_SCALAR = re.compile(r"[+-]?(?:nan|inf|infinity)\b", re.IGNORECASE)
_NUMBER_GOES_ON = re.compile(r"[-+.eE0-9]*\Z")
_LONGEST_WORD = 20  # of JSON's own: a number, a literal, an escape
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Where and why a file ends before its JSON does."""

    line: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """An item that is no JSON although its brackets match."""

    line: int


def json_items(path: Path, arrays: Collection[str]) -> Iterator[tuple[str, object]]:
    """(key, value) for each value of the outer object; (key, element) for each element where `arrays` names the key.

    Elements of an outer array have the key "". A value may be a `Cut` (then it is the last), or `Broken`.

    Raises:
        InputError: cannot be read, no JSON, nested too deep, an item of more than 16 million characters, a file that
            unpacks to more than 16 GB or to more than 200 times its size.
    """
    try:
        with open_text(path) as file:
            yield from _Reader(path, file).items(arrays)
    except FileNotFoundError as error:
        raise InputError("no such file", file=path) from error
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot be read: {reason}", file=path) from error


class _Reader:
    """A window of text that moves over the file."""

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.path, self.file, self.size = path, file, max(path.stat().st_size, 1)
        self.decode = getincrementaldecoder("utf-8-sig")(errors="replace").decode
        self.text, self.at, self.lines, self.bytes = "", 0, 0, 0
        self.ended, self.end_reason, self.broken, self.was_cut = False, "the file ends there", 0, False

    def items(self, arrays: Collection[str]) -> Iterator[tuple[str, object]]:
        first = self.next_character()
        if first == "[":
            self.at += 1
            yield from self.elements("")
        elif first == "{":
            self.at += 1
            yield from self.members(arrays)
        else:
            found = "an empty file" if first == "" else f"'{first}'"
            raise self.error(f"expected JSON, that is a '{{' or '[' at the beginning, found {found}")
        if not self.was_cut and self.next_character():
            raise self.error("text after the end of the JSON: are these two files in one?")

    def members(self, arrays: Collection[str]) -> Iterator[tuple[str, object]]:
        seen: set[str] = set()
        while True:
            character = self.next_character()
            if character == "}":
                self.at += 1
                return
            if character == ",":
                self.at += 1
                continue
            if character == "":
                yield "", self.cut()
                return
            key = self.value()
            if isinstance(key, Cut):
                yield "", key
                return
            if not isinstance(key, str) or self.next_character() not in (":", ""):
                raise self.error("expected a key in quotes and a colon")
            self.at += 1
            if key in seen and key in arrays:
                raise self.error(f"the key '{key}' stands twice")
            seen.add(key)
            if key in arrays and self.next_character() == "[":
                self.at += 1
                yield from self.elements(key)
                continue
            value = self.value()
            yield ("" if isinstance(value, Cut) else key), value
            if isinstance(value, Cut):
                return

    def elements(self, key: str) -> Iterator[tuple[str, object]]:
        while True:
            between = _BETWEEN.match(self.text, self.at)
            at = between.end() if between else self.at
            if self.text.startswith("{", at):  # nearly always: a whole object lies in the window
                try:
                    value, self.at = _DECODER.raw_decode(self.text, at)
                except (ValueError, RecursionError):
                    pass  # below: more text, a repair, or a refusal
                else:
                    yield key, value
                    continue
            character = self.next_character()
            if character == "]":
                self.at += 1
                return
            if character == ",":
                self.at += 1
                continue
            value = self.cut() if character == "" else self.value()
            yield ("" if isinstance(value, Cut) else key), value
            if isinstance(value, Cut):
                return

    def value(self) -> object:
        """The value that begins after this space."""
        if not self.next_character():
            return self.cut()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
            except RecursionError:
                raise self.error("nested deeper than any profiler writes") from None
            except ValueError as error:
                if self.is_wrong(error):
                    end = self.closing()
                    if end or self.text[self.at] not in "{[":
                        return self.repaired(end)
                if len(self.text) - self.at > MOST_ITEM_CHARACTERS:
                    message = f"a value of more than {MOST_ITEM_CHARACTERS:,} characters, or no JSON"
                    raise self.error(message) from error
                if not self.fill():
                    end = self.closing() if self.text[self.at] in "{[" else 0
                    return self.repaired(end) if end or _SCALAR.match(self.text, self.at) else self.cut()
                continue
            if not isinstance(value, dict | list | str) and _NUMBER_GOES_ON.match(self.text, end) and self.fill():
                continue
            self.at = end
            return value

    def is_wrong(self, error: ValueError) -> bool:
        """The decoder stopped at something that more text cannot mend."""
        if not isinstance(error, json.JSONDecodeError):
            return True  # an integer of thousands of digits
        return not error.msg.startswith("Unterminated") and error.pos < len(self.text) - _LONGEST_WORD

    def closing(self) -> int:
        """Where the bracket that opens here closes; 0 where it does not yet."""
        depth = 0
        for token in _STRUCTURE.finditer(self.text, self.at):
            depth += (token[0] in ("{", "[")) - (token[0] in ("}", "]"))
            if depth <= 0:
                return token.end()
        return 0

    def repaired(self, end: int) -> object:
        """The item up to `end` with floats of printf and stray backslashes mended."""
        line = self.line
        scalar = _SCALAR.match(self.text, self.at)
        if not end and scalar is None:
            raise self.error(f"expected JSON, found '{self.text[self.at : self.at + 20].split(chr(10))[0]}'")
        if scalar is not None:
            self.at = scalar.end()
            return None
        piece = _BAD_NUMBER.sub(r"\1null", self.text[self.at : end])
        self.at = end
        for text in (piece, _BAD_ESCAPE.sub(r"\\\\", piece)):
            try:
                return _DECODER.decode(text)
            except (ValueError, RecursionError):
                continue
        self.broken += 1
        if self.broken > MOST_BROKEN_ITEMS:
            raise InputError(f"more than {MOST_BROKEN_ITEMS:,} items are no JSON", file=self.path, line=line)
        return Broken(line=line)

    def next_character(self) -> str:
        """The first that is no space; empty at the end."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.fill():
                return ""

    def fill(self) -> bool:
        """One more chunk; False at the end of the file."""
        if self.ended:
            return False
        chunk = self.chunk()
        self.bytes += len(chunk)
        if self.bytes > MOST_FILE_BYTES:
            raise self.error(f"unpacks to more than {MOST_FILE_BYTES:,} bytes")
        if self.bytes > max(UNSUSPICIOUS_BYTES, MOST_PACKING * self.size):
            raise self.error(f"{self.size:,} bytes unpack to more than {MOST_PACKING} times as many: no trace does")
        if b"\x00" in chunk:
            raise self.error("expected text, found a binary file")
        self.ended = not chunk
        self.lines += self.text.count("\n", 0, self.at)
        self.text, self.at = self.text[self.at :] + self.decode(chunk, self.ended), 0
        return not self.ended or self.text != ""

    def chunk(self) -> bytes:
        """The next megabyte. Of a gzip file that ends early all that there is: a plain read would lose it."""
        parts, size = [], 0
        while size < _CHUNK_BYTES:
            try:
                part = self.file.read1(_CHUNK_BYTES - size)
            except EOFError:
                self.end_reason = "the gzip file ends there"
                break
            if not part:
                break
            parts.append(part)
            size += len(part)
        return b"".join(parts)

    @property
    def line(self) -> int:
        return self.lines + self.text.count("\n", 0, self.at) + 1

    def cut(self) -> Cut:
        self.was_cut = True
        return Cut(line=self.line, reason=self.end_reason)

    def error(self, message: str) -> InputError:
        return InputError(message, file=self.path, line=self.line)
