"""Manifests of images and their captions: .jsonl, .csv or .tsv. Imports no torch.

JSON lines: `{"image": "a.jpg", "captions": ["a dog", "a brown dog"]}` or one `caption` a line. CSV: columns `image` and
`caption`, a row for each caption. Paths count from the manifest's folder. A caption of several images belongs to each.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmplan.errors import InputError
from mmplan.scenario.document import listed, shown
from mmplan.scenario.manifest import MAX_ROWS, text_rows

_IMAGE = ("image", "image_path", "file_name", "filename", "image_name", "path")
_CAPTION = ("caption", "captions", "text", "comment")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionSet:
    """Images, different captions, and which belong together: pairs of (image, caption) by index."""

    images: tuple[Path, ...]
    captions: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]


def read_captions(path: Path, limit: int | None = None) -> CaptionSet:
    """Read a manifest.

    Args:
        limit: so many first images.

    Raises:
        InputError: with file and line: no manifest, a missing image, a pair that stands twice, an empty caption.
    """
    images: dict[str, int] = {}
    captions: dict[str, int] = {}
    lines: dict[tuple[int, int], int] = {}
    count = 0
    for line, row in text_rows(path):
        name, texts = _image(row, path, line), _captions(row, path, line)
        if name not in images:
            if limit is not None and len(images) >= limit:
                continue
            if not (path.parent / name).is_file():
                raise InputError(f"there is no image {shown(name)}", file=path, line=line)
            images[name] = len(images)
        for text in texts:
            count += 1
            pair = (images[name], captions.setdefault(text, len(captions)))
            if pair in lines:
                message = f"the caption {shown(text)} of {shown(name)} stands in line {lines[pair]} too"
                raise InputError(message, file=path, line=line)
            lines[pair] = line
        if count > MAX_ROWS:
            raise InputError(f"a manifest has at most {MAX_ROWS:,} captions", file=path, line=line)
    if len(images) < 2:
        raise InputError(f"retrieval needs at least 2 images, the manifest has {len(images)}", file=path)
    found = tuple(path.parent / name for name in images)
    return CaptionSet(images=found, captions=tuple(captions), pairs=tuple(lines))


def _image(row: dict[str, Any], path: Path, line: int) -> str:
    key = _key(row, _IMAGE, path, line)
    value = row[key]
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise InputError(f"expected the path of an image, found {shown(value)}", file=path, line=line, key=key)
    return value.strip()


def _captions(row: dict[str, Any], path: Path, line: int) -> list[str]:
    key = _key(row, _CAPTION, path, line)
    value = row[key]
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"expected a caption, found {shown(text)}", file=path, line=line, key=key)
    if not texts:
        raise InputError("expected at least one caption, found an empty list", file=path, line=line, key=key)
    return [text.strip() for text in texts]


def _key(row: dict[str, Any], names: tuple[str, ...], path: Path, line: int) -> str:
    found = [name for name in names if name in row]
    if len(found) != 1:
        there = f"found {listed(found)}" if found else f"found {listed(row)}" if row else "found none"
        raise InputError(f"expected one of the keys {listed(names)}, {there}", file=path, line=line)
    return found[0]
