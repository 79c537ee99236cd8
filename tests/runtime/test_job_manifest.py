"""`execute --job --data`: rows of a manifest as batches, their order, and what is wrong with a manifest."""

import json
from itertools import islice
from pathlib import Path

import pytest

from mmplan.errors import InputError
from mmplan.runtime.ghost.manifest import manifest_batches, read_rows


def written(folder: Path, text: str, name: str = "data.jsonl") -> Path:
    for image in ("a.png", "b.png"):
        (folder / image).write_bytes(image.encode())
    (folder / name).write_text(text)
    return folder / name


def test_files_become_absolute_and_other_values_stay(tmp_path: Path) -> None:
    lines = [{"image": "a.png", "text": "one", "n": 3}, {"images": ["a.png", "b.png"], "text": "two"}]
    rows = read_rows(written(tmp_path, "\n".join(map(json.dumps, lines))))
    a, b = str(tmp_path / "a.png"), str(tmp_path / "b.png")
    assert rows == ({"image": a, "text": "one", "n": 3}, {"images": [a, b], "text": "two"})
    assert read_rows(written(tmp_path, "image\ttext\na.png\tone\n", "data.tsv")) == ({"image": a, "text": "one"},)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ('{"text": "x"}\n{"image": "c.png"}', "d.jsonl", r"d.jsonl:2: image: there is no file 'c.png'"),
        ('{"image": 3}', "d.jsonl", r"d.jsonl:1: image: expected the path of a file, found 3"),
        ("", "d.jsonl", "the manifest has no rows"),
        ("x", "d.parquet", "expected a manifest that ends in '.jsonl', '.csv', '.tsv'"),
        ("image,text\na.png\n", "d.csv", r"d.csv:2: expected 2 cells as in the header, found 1"),
    ],
)
def test_a_manifest_that_is_none_is_refused_by_line(text: str, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_rows(written(tmp_path, text, name))


def test_every_epoch_has_each_row_once_in_an_order_of_its_own_from_any_start() -> None:
    rows = tuple({"n": n} for n in range(7))
    batches = manifest_batches(rows, lambda some: {"n": [row["n"] for row in some]})
    whole = [batch["n"] for batch in islice(batches(3), 14)]
    drawn = [n for batch in whole for n in batch]
    epochs = [drawn[first : first + 7] for first in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    for start in (1, 5, 9):
        assert [batch["n"] for batch in islice(batches(3, start=start), 3)] == whole[start : start + 3]
