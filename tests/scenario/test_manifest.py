"""Manifests: rows become samples; wrong rows are named with the manifest's own line."""

from pathlib import Path

import pytest

from mmplan.errors import InputError
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Sample, Scenario

ROOT = Path(__file__).parents[2]


def load_with(folder: Path, name: str, content: str) -> Scenario:
    """tiny.yaml with the data replaced by a manifest."""
    text = (ROOT / "scenarios" / "tiny.yaml").read_text()
    start, end = text.index("data:\n"), text.index("batch:")
    (folder / "scenario.yaml").write_text(f"{text[:start]}data: {{manifest: {name}}}\n{text[end:]}")
    (folder / name).write_text(content)
    return load_scenario(folder / "scenario.yaml")


def data_line(folder: Path) -> str:
    """Number of the line that names the manifest."""
    lines = (folder / "scenario.yaml").read_text().splitlines()
    return str(next(number for number, line in enumerate(lines, start=1) if line.startswith("data:")))


def test_json_lines_and_csv_give_the_same_samples(tmp_path: Path) -> None:
    lines = '{"text_tokens": 12, "images": ["48x64", 32], "audio_seconds": [0.5]}\n\n{"text_tokens": 3}\n'
    table = "text_tokens,images,audio_seconds\n12,48x64;32,0.5\n\n3,,\n"
    rows = (Sample(text_tokens=12, images=((48, 64), (32, 32)), audio_s=(0.5,)), Sample(text_tokens=3))
    assert load_with(tmp_path, "rows.jsonl", lines).data.manifest == rows
    assert load_with(tmp_path, "rows.csv", table).data.manifest == rows


GOOD_ROW = '{"text_tokens": 12, "images": [32], "audio_seconds": [0.5]}\n'
CASES = [
    (
        "rows.jsonl",
        GOOD_ROW + '{"text_tokens": 0}',
        "rows.jsonl:2: text_tokens: expected a whole number from 1 to 10,000,000, found 0",
    ),
    (
        "rows.jsonl",
        GOOD_ROW + '{"text_tokens": true}',
        "rows.jsonl:2: text_tokens: expected a whole number from 1 to 10,000,000, found the boolean true",
    ),
    (
        "rows.jsonl",
        GOOD_ROW + '{"text_token": 4}',
        "rows.jsonl:2: unknown key 'text_token'; did you mean 'text_tokens'?",
    ),
    ("rows.jsonl", GOOD_ROW + '{"images": []}', "rows.jsonl:2: text_tokens: this key is missing"),
    ("rows.jsonl", GOOD_ROW + "{", "rows.jsonl:2: expected a JSON object on this line"),
    ("rows.jsonl", GOOD_ROW + "7", "rows.jsonl:2: expected a JSON object, found 7"),
    (
        "rows.jsonl",
        '{"text_tokens": 1, "images": 2}',
        'rows.jsonl:1: images: expected a list, one entry for each, such as [336, "480x640"], found 2',
    ),
    ("rows.csv", "text_tokens,images,text_tokens\n1,32,1\n", "rows.csv:1: the column 'text_tokens' stands twice"),
    (
        "rows.jsonl",
        '{"text_tokens": 1, "images": ["9by9"]}',
        "rows.jsonl:1: images: expected pixels such as 336 or '480x640' (height x width), found '9by9'",
    ),
    (
        "rows.jsonl",
        '{"text_tokens": 1, "audio_seconds": [-1]}',
        "rows.jsonl:1: audio_seconds: expected seconds above 0 and up to 100000, found -1",
    ),
    (
        "rows.jsonl",
        '{"text_tokens": 1, "audio_seconds": [NaN]}',
        "rows.jsonl:1: audio_seconds: expected seconds above 0 and up to 100000, found nan",
    ),
    ("rows.jsonl", "", "rows.jsonl: the manifest has no rows"),
    ("rows.csv", "text_tokens,images\n1,32\n1\n", "rows.csv:3: expected 2 cells as in the header, found 1"),
    (
        "rows.csv",
        "text_tokens\nmany\n",
        "rows.csv:2: text_tokens: expected a whole number from 1 to 10,000,000, found 'many'",
    ),
    (
        "rows.csv",
        "text_tokens,size\n1,2\n",
        "rows.csv:2: unknown key 'size'; known keys: 'text_tokens', 'images', 'audio_seconds', 'speech_tokens'",
    ),
    ("rows.parquet", "x", "scenario.yaml:LINE: data.manifest: expected a .jsonl or .csv file, found 'rows.parquet'"),
    (
        "rows.jsonl",
        '{"text_tokens": 1, "audio_seconds": [1]}',
        "scenario.yaml:LINE: data.manifest: module 'vision' has nothing to work on: the data hold no images",
    ),
    (
        "rows.jsonl",
        GOOD_ROW + '{"text_tokens": 1, "speech_tokens": 4}',
        "scenario.yaml:LINE: data.manifest: the data hold speech tokens, but no module reads them",
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), CASES)
def test_a_wrong_manifest_is_refused_with_one_sentence(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_with(tmp_path, name, content)
    assert str(caught.value) == f"{tmp_path}/{message.replace('LINE', data_line(tmp_path))}"


def test_a_missing_manifest_is_named_at_its_key(tmp_path: Path) -> None:
    load_with(tmp_path, "rows.jsonl", GOOD_ROW)
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(InputError) as caught:
        load_scenario(tmp_path / "scenario.yaml")
    place = f"{tmp_path / 'scenario.yaml'}:{data_line(tmp_path)}: data.manifest"
    assert str(caught.value) == f"{place}: {tmp_path / 'rows.jsonl'}: no such file"
