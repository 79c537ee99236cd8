"""One line of an nccl-tests or rccl-tests table, whatever its columns: the old ones with `error`, with or without redop
and root, wide ones, a last column that is missing, and rank tags before or inside of it.

The numbers themselves tell which column is which: algbw is size / time in every version, so the layout that fulfils
this is the right one, and a row that fulfils it in none is damaged.
"""

import re
from dataclasses import dataclass

TYPE_BYTES = {
    "int8": 1, "uint8": 1, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "int": 4, "uint": 4, "char": 1,
    "half": 2, "float": 4, "double": 8, "bfloat16": 2, "bf16": 2, "fp16": 2, "float16": 2, "float32": 4,
    "f8e4m3": 1, "f8e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8": 1,
}  # fmt: skip
REDOPS = ("sum", "prod", "max", "min", "avg", "mulsum", "none")

_TAG = re.compile(r"\[\d+(?:,\d+)?\](?:<std\w+>:?)?")
_ROW = re.compile(rf"(?<![\w.,-])(\d{{1,18}})\s+(\d{{1,18}})\s+({'|'.join(TYPE_BYTES)})\s+(?=\S)", re.ASCII)
_PLACEHOLDER = re.compile(r"[Xx]{2,}(?:\.[Xx]+)?|\?+|<[\w ]+>")
_NUMBER = re.compile(r"\d{1,12}(?:\.\d{1,6})?", re.ASCII)
_ROOT = re.compile(r"-1|\d{1,6}", re.ASCII)
_ERRORS = re.compile(r"N/A|\d{1,18}|\d(?:\.\d+)?e[+-]\d+|nan|inf", re.ASCII)


@dataclass(frozen=True, slots=True)
class Block:
    """Out of place, or in place. `wrong`: how many values are wrong. `checked`: whether they were (False: N/A is
    printed); None where the column is missing."""

    time_us: float
    algbw: float  # GB/s, as busbw
    busbw: float
    digits: int  # of the time after the point
    wrong: float | None
    checked: bool | None


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; `root` and `redop` are None where there is no such column."""

    line: int
    size_bytes: int
    count: int
    dtype: str
    redop: str | None
    root: int | None
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Damaged:
    """A line that begins as a row and is none."""

    line: int
    why: str
    placeholder: bool = False
    cut: bool = False  # it has no whole block: the text ends in it, or something was lost


def read_row(text: str, line: int) -> Row | Damaged | None:
    """The row of a line, or what is wrong with it; None where the line is no row."""
    match = _ROW.search(text[:2000]) or _ROW.search(_TAG.sub(" ", text[:2000]))
    if match is None:
        return None
    words = _TAG.sub(" ", match.string[match.end() :]).split()
    redop = words.pop(0) if words and words[0] in REDOPS else None
    if any(_PLACEHOLDER.fullmatch(word) for word in words[:8]):
        return Damaged(line, "placeholders stand where numbers should", placeholder=True)
    size, count = int(match[1]), int(match[2])
    found = []
    for start in (0, 1):
        if start == 1 and not (words and _ROOT.fullmatch(words[0])):
            continue
        blocks = _blocks(words[start:], size)
        if blocks is not None:
            found.append((len(words) - start - blocks[1], start, blocks[0]))
    if not found:
        return Damaged(line, _why(words, size), cut=len(words) < 4)
    # the layout that leaves the fewest words over; with a root where that is open
    _, start, kept = min(found, key=lambda one: (one[0], -one[1]))
    root = int(words[0]) if start else None
    return Row(line, size, count, match[3], redop, root, kept)


def _blocks(words: list[str], size: int) -> tuple[tuple[Block, ...], int] | None:
    """One or two blocks at the beginning of `words` and how many of these they take; None where the first is none."""
    blocks: list[Block] = []
    place = 0
    while place < len(words) and len(blocks) < 2:
        numbers = words[place : place + 3]
        if len(numbers) < 3 or not all(_NUMBER.fullmatch(word) for word in numbers):
            break
        time_us, algbw, busbw = map(float, numbers)
        digits = len(numbers[0].partition(".")[2])
        if not _agrees(size, time_us, algbw, digits):
            time_us, digits = time_us * 1e3, digits - 3  # until 2017 times were in milliseconds
            if not _agrees(size, time_us, algbw, digits):
                break
        place += 3
        told = words[place] if place < len(words) and _ERRORS.fullmatch(words[place]) else None
        if told is not None and (len(blocks) == 1 or place + 1 == len(words) or _is_time_after(words, place)):
            place += 1
        else:
            told = None
        wrong = float(told) if told is not None and told.isdigit() else None
        blocks.append(Block(time_us, algbw, busbw, digits, wrong, None if told is None else told != "N/A"))
    return (tuple(blocks), place) if blocks else None


def _is_time_after(words: list[str], place: int) -> bool:
    """After this word a block may follow: it is the error of the block before it, no time."""
    return "N/A" in words[place] or "e" in words[place] or len(words) - place - 1 >= 3


def _agrees(size: int, time_us: float, algbw: float, digits: int) -> bool:
    """algbw is size / time, as far as both were rounded."""
    if time_us <= 0:
        return False
    half = 0.5 * 10.0**-digits
    most = size / max(time_us - half, 1e-9) / 1e3
    least = size / (time_us + half) / 1e3
    return least * 0.999 - 0.006 <= algbw <= most * 1.001 + 0.006


def _why(words: list[str], size: int) -> str:
    numbers = [word for word in words if _NUMBER.fullmatch(word)]
    if len(numbers) < 3:
        return "the row has no time, algbw and busbw"
    if words and words[0] == "-1":
        numbers = [word for word in words[1:] if _NUMBER.fullmatch(word)]
    time_us = float(numbers[0])
    expected = size / time_us / 1e3 if time_us > 0 else 0.0
    return f"algbw {numbers[1]} GB/s is not {size:,} bytes in {numbers[0]} us = {expected:.2f} GB/s"
