"""A job's data from a manifest of files and texts: rows in a new order each epoch, made into batches by the job.

JSON lines, CSV or TSV, one sample a row. Every text that names a file beside the manifest, in one of the columns
`image`, `images`, `audio`, `video` and their like, becomes its absolute path. Nothing is opened here. Imports no torch.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

from mmplan.errors import InputError
from mmplan.scenario.document import shown
from mmplan.scenario.manifest import MAX_ROWS, text_rows

Row = dict[str, Any]
FILES = ("image", "images", "image_path", "audio", "audios", "audio_path", "video", "videos", "video_path")
_SEED = 0  # the same order in every process and after every resume


def read_rows(path: Path) -> tuple[Row, ...]:
    """The samples, files by their absolute paths.

    Raises:
        InputError: with file, line and key: no manifest, no rows, or a file that is not there.
    """
    rows: list[Row] = []
    for line, row in text_rows(path):
        rows.append(row | {key: _files(row[key], path, line, key) for key in FILES if row.get(key)})
        if len(rows) > MAX_ROWS:
            raise InputError(f"a manifest has at most {MAX_ROWS:,} rows", file=path, line=line)
    if not rows:
        raise InputError("the manifest has no rows", file=path)
    return tuple(rows)


def manifest_batches(rows: Sequence[Row], collate: Callable[[list[Row]], Row]) -> Callable[..., Iterator[Row]]:
    """`batches(size, start=0)` of a job, without end; what is left of an epoch begins the next one's first batch."""

    def batches(size: int, start: int = 0) -> Iterator[Row]:
        samples = _in_order(rows, start * size)
        while True:
            yield collate(list(islice(samples, size)))

    return batches


def _in_order(rows: Sequence[Row], first: int) -> Iterator[Row]:
    """Rows from the `first`-th on, each epoch in an order of its own."""
    for epoch in count(first // len(rows)):
        order = Random(f"{_SEED}/{epoch}").sample(range(len(rows)), len(rows))
        yield from (rows[place] for place in order[max(0, first - epoch * len(rows)) :])


def _files(value: Any, path: Path, line: int, key: str) -> Any:
    """One path, or a list of them."""
    if isinstance(value, list):
        return [_files(item, path, line, key) for item in value]
    if not isinstance(value, str) or "\0" in value:
        raise InputError(f"expected the path of a file, found {shown(value)}", file=path, line=line, key=key)
    file = path.parent / value
    if not file.is_file():
        raise InputError(f"there is no file {shown(value)}", file=path, line=line, key=key)
    return str(file.resolve())
