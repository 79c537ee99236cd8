"""Manifests: one sample per row, as .jsonl or .csv.

JSON lines: `{"text_tokens": 812, "images": ["480x640", 336], "audio_seconds": [3.2], "speech_tokens": 0}`.
CSV: the same names as columns, several images or clips in a cell separated by `;`. Only `text_tokens` must be given.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

from mmplan.errors import InputError
from mmplan.scenario.document import Document, did_you_mean, listed, read_text, shown
from mmplan.scenario.scenario import Sample
from mmplan.scenario.schema_values import parse_image_sizes

MAX_MANIFEST_BYTES = 64_000_000
MAX_ROWS = 200_000
MAX_TOKENS = 10_000_000
MAX_CLIP_S = 100_000.0
COLUMNS = ("text_tokens", "images", "audio_seconds", "speech_tokens")


def read_manifest(path: Path, document: Document) -> tuple[Sample, ...]:
    """All samples of a manifest.

    Raises:
        InputError: naming the manifest and line, or the scenario's key when the file cannot be read.
    """
    at = ("data", "manifest")
    if path.suffix not in (".jsonl", ".csv"):
        raise document.error(at, f"expected a .jsonl or .csv file, found {shown(str(path.name))}")
    try:
        text = read_text(path, "manifest", MAX_MANIFEST_BYTES)
    except InputError as error:
        raise document.error(at, f"{path}: {error.message}") from error
    rows = json_rows(text, path) if path.suffix == ".jsonl" else csv_rows(text, path, _cell)
    samples = []
    for line, row in rows:
        samples.append(_sample(row, path, line))
        if len(samples) > MAX_ROWS:
            raise InputError(f"a manifest has at most {MAX_ROWS:,} rows", file=path, line=line)
    if not samples:
        raise InputError("the manifest has no rows", file=path)
    return tuple(samples)


def text_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line and values of each row of JSON lines, CSV or TSV, whose cells stay texts.

    Raises:
        InputError: with file and line: another kind of file, or one that cannot be read.
    """
    delimiters = {".csv": ",", ".tsv": "\t"}
    suffix = path.suffix.lower()
    if suffix != ".jsonl" and suffix not in delimiters:
        raise InputError(f"expected a manifest that ends in {listed(['.jsonl', *delimiters])}", file=path)
    text = read_text(path, "manifest", MAX_MANIFEST_BYTES)
    if suffix == ".jsonl":
        return json_rows(text, path)
    return csv_rows(text, path, lambda _, cell: cell, delimiters[suffix])


def json_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line and object of each line that is not empty."""
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InputError("expected a JSON object on this line", file=path, line=line) from error
        if not isinstance(row, dict):
            raise InputError(f"expected a JSON object, found {shown(row)}", file=path, line=line)
        yield line, row


def csv_rows(
    text: str, path: Path, cell: Callable[[str, str], Any], delimiter: str = ","
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line and values by column of each row that is not empty; `cell(column, text)` gives a value."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        header = [name.strip() for name in next(reader, [])]
        for name in header:
            if header.count(name) > 1:
                raise InputError(f"the column {shown(name)} stands twice", file=path, line=1)
        for cells in reader:
            if not any(text.strip() for text in cells):
                continue
            if len(cells) != len(header):
                message = f"expected {len(header)} cells as in the header, found {len(cells)}"
                raise InputError(message, file=path, line=reader.line_num)
            yield reader.line_num, {name: cell(name, text.strip()) for name, text in zip(header, cells, strict=True)}
    except csv.Error as error:
        raise InputError(f"not valid CSV: {error}", file=path, line=reader.line_num) from error


def _cell(name: str, text: str) -> Any:
    """A CSV cell as the value that JSON would have there."""
    if name in ("images", "audio_seconds"):
        return [_number(part.strip()) for part in text.split(";")] if text else []
    return _number(text) if text else 0


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _sample(row: dict[str, Any], path: Path, line: int) -> Sample:
    for key in row:
        if key not in COLUMNS:
            hint = did_you_mean(str(key), COLUMNS) or f"; known keys: {listed(COLUMNS)}"
            raise InputError(f"unknown key {shown(key)}{hint}", file=path, line=line)
    if "text_tokens" not in row:
        raise InputError("this key is missing", file=path, line=line, key="text_tokens")
    images, clips = row.get("images", []), row.get("audio_seconds", [])
    for key, value, example in (("images", images, '[336, "480x640"]'), ("audio_seconds", clips, "[3.2, 30]")):
        if not isinstance(value, list):
            message = f"expected a list, one entry for each, such as {example}, found {shown(value)}"
            raise InputError(message, file=path, line=line, key=key)
    try:
        sizes = parse_image_sizes(images) if images else ()
    except PydanticCustomError as error:
        raise InputError(error.message(), file=path, line=line, key="images") from error
    for clip in clips:
        if isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip <= MAX_CLIP_S:
            message = f"expected seconds above 0 and up to {MAX_CLIP_S:g}, found {shown(clip)}"
            raise InputError(message, file=path, line=line, key="audio_seconds")
    return Sample(
        text_tokens=_tokens(row, "text_tokens", 1, path, line),
        images=sizes,
        audio_s=tuple(float(clip) for clip in clips),
        speech_tokens=_tokens(row, "speech_tokens", 0, path, line),
    )


def _tokens(row: dict[str, Any], key: str, least: int, path: Path, line: int) -> int:
    value = row.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_TOKENS:
        message = f"expected a whole number from {least} to {MAX_TOKENS:,}, found {shown(value)}"
        raise InputError(message, file=path, line=line, key=key)
    return value
