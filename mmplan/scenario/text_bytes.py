"""Bytes of a text file as UTF-8, however it is packed and encoded: gzip by its first bytes, UTF-16 of PowerShell's `>`.

What other programs pack (zip, xz, zstd, bzip2) is refused by its name.
"""

import gzip
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE, getincrementaldecoder
from contextlib import suppress
from io import BufferedReader, RawIOBase
from pathlib import Path
from stat import S_ISBLK, S_ISCHR, S_ISFIFO, S_ISSOCK
from typing import cast

from mmplan.errors import InputError

MOST_PACKING = 200  # gzip of text full of numbers packs 10 to 40 times
UNSUSPICIOUS_BYTES = 50_000_000
_HEAD_BYTES = 512
_CHUNK_BYTES = 1 << 16
_PACKED = {
    b"PK\x03\x04": "zip",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"7z\xbc\xaf": "7z",
}


def encoding_of(head: bytes) -> str:
    """Of a text by its mark, or by the zeros of UTF-16 without one: in every other byte, and in no others."""
    for mark, encoding in (
        (BOM_UTF32_LE, "utf-32"),
        (BOM_UTF32_BE, "utf-32"),
        (BOM_UTF16_LE, "utf-16"),
        (BOM_UTF16_BE, "utf-16"),
    ):
        if head.startswith(mark):
            return encoding
    zeros = [head[first:_HEAD_BYTES:2].count(0) for first in (0, 1)]
    if min(zeros) == 0 and max(zeros) >= 2 and 4 * max(zeros) >= len(head[:_HEAD_BYTES]):
        return "utf-16-be" if zeros[0] else "utf-16-le"
    return "utf-8-sig"


def refuse_packed(path: Path, head: bytes) -> None:
    """InputError for the beginning of an archive that is not read."""
    for mark, name in _PACKED.items():
        if head.startswith(mark):
            raise InputError(f"a {name} file: unpack it and give the file inside", file=path)


def refuse_bomb(path: Path, unpacked_bytes: int, size_bytes: int) -> None:
    """InputError for a file that unpacks to far more than text does."""
    if unpacked_bytes > max(UNSUSPICIOUS_BYTES, MOST_PACKING * size_bytes):
        raise InputError(f"unpacks to more than {MOST_PACKING} times its size", file=path)


def refuse_pipe(path: Path) -> None:
    """InputError for a pipe or a device: it can be read only once, or without end."""
    with suppress(OSError, ValueError):  # said by whoever opens it
        if any(kind(path.stat().st_mode) for kind in (S_ISFIFO, S_ISCHR, S_ISBLK, S_ISSOCK)):
            raise InputError("a pipe or a device: write what it gives into a file, and give that", file=path)


def open_text(path: Path) -> BufferedReader:
    """The file's bytes, unpacked, and as UTF-8 where it is UTF-16 or UTF-32; a mark of UTF-8 stays.

    Raises:
        InputError: an archive of another kind, a pipe, a device.
        OSError, EOFError, zlib.error: cannot be read.
    """
    refuse_pipe(path)
    with path.open("rb") as plain:
        head = plain.read(_HEAD_BYTES)
    refuse_packed(path, head)
    packed = head[:2] == b"\x1f\x8b"
    file = cast(BufferedReader, gzip.GzipFile(path)) if packed else path.open("rb")
    encoding = encoding_of(_unpacked(head) if packed else head)
    return file if encoding == "utf-8-sig" else BufferedReader(_Recoded(file, encoding))


def _unpacked(head: bytes) -> bytes:
    """The beginning of what a gzip file holds, as far as its first bytes give it."""
    try:
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(head, _HEAD_BYTES)
    except zlib.error:
        return b""


class _Recoded(RawIOBase):
    """The text of a file as UTF-8."""

    def __init__(self, source: BufferedReader, encoding: str) -> None:
        self.source, self.kept = source, b""
        self.decode = getincrementaldecoder(encoding)("replace").decode

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self.kept:
            raw = self.source.read(_CHUNK_BYTES)
            self.kept = self.decode(raw, not raw).encode("utf-8", "replace")
            if not raw:
                break
        count = min(len(buffer), len(self.kept))
        buffer[:count] = self.kept[:count]
        self.kept = self.kept[count:]
        return count

    def close(self) -> None:
        self.source.close()
        super().close()
