"""JSON of any size, item by item: whole items of damaged files, and refusals that name the line."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmplan.cost_models.formats import json_stream
from mmplan.cost_models.formats.json_stream import Broken, Cut, json_items
from mmplan.errors import InputError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def items(path: Path, text: str | bytes) -> list[tuple[str, object]]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(json_items(path, ("a",)))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(head=st.dictionaries(st.text(max_size=6).filter(lambda k: k != "a"), VALUES, max_size=3), array=st.lists(VALUES))
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_items_are_those_of_the_whole_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, head: dict[str, object], array: list[object]
) -> None:
    monkeypatch.setattr(json_stream, "_CHUNK_BYTES", chunk)
    text = json.dumps({**head, "a": array}, indent=1, ensure_ascii=False)
    expected = [*json.loads(json.dumps(head)).items(), *(("a", value) for value in json.loads(json.dumps(array)))]
    assert items(tmp_path / "t.json", text) == expected
    assert items(tmp_path / "t.json", gzip.compress(text.encode())) == expected


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(array=st.lists(VALUES, min_size=1), data=st.data())
def test_a_file_cut_anywhere_gives_a_prefix_and_a_cut(tmp_path: Path, array: list[object], data: st.DataObject) -> None:
    text = json.dumps({"a": array})
    end = data.draw(st.integers(1, len(text) - 1))
    *whole, (_, last) = items(tmp_path / "t.json", text[:end])
    assert isinstance(last, Cut)
    values = [value for key, value in whole if key == "a"]
    known = json.loads(json.dumps(array))
    assert values[:-1] == known[: max(0, len(values) - 1)]
    assert not values or values[-1] == known[len(values) - 1] or isinstance(known[len(values) - 1], int | float)


def test_floats_that_json_does_not_know_become_nothing(tmp_path: Path) -> None:
    found = items(tmp_path / "t.json", '{"a": [{"x": inf, "y": -nan, "z": "nan, inf"}, {"x": 1}], "b": nan}')
    assert found == [("a", {"x": None, "y": None, "z": "nan, inf"}), ("a", {"x": 1}), ("b", None)]


def test_a_backslash_of_windows_is_kept(tmp_path: Path) -> None:
    assert items(tmp_path / "t.json", '{"a": [{"f": "C:\\models\\q.py\\n"}]}') == [("a", {"f": "C:\\models\\q.py\n"})]


def test_an_item_that_is_no_json_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    found = items(tmp_path / "t.json", '{"a": [{"x": 1},\n{"x": 1 2, "long": "........................"},\n{"x": 3}]}')
    assert found == [("a", {"x": 1}), ("a", Broken(line=2)), ("a", {"x": 3})]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "found an empty file"),
        ("   \n ", "found an empty file"),
        ("name,value\n1,2", ":1: expected JSON, that is a '{' or '[' at the beginning, found 'n'"),
        ('{"a": [' + "[" * 200_000, "nested deeper"),
        ('{"a": [1], "a": [2]}', "the key 'a' stands twice"),
        ('{"a": [1]}\n{"a": [2]}', ":2: text after the end of the JSON"),
        ('{"a": [1]} x', "text after the end"),
        ("{1: 2}", "expected a key in quotes"),
        ('{"a": [}, ........................', "expected JSON, found '"),
        (b"\x00\x01\x02 SQLite", "found a binary file"),
        (b'{"a": [\x00', "found a binary file"),
        (b"\x1f\x8b\x08\x00 this is no gzip at all", "cannot be read"),
    ],
)
def test_what_is_no_json_is_refused(tmp_path: Path, content: str | bytes, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        items(tmp_path / "t.json", content)
    assert sentence in str(caught.value)


def test_a_gzip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "UNSUSPICIOUS_BYTES", 1_000_000)
    with pytest.raises(InputError, match="unpack to more than 200 times"):
        items(tmp_path / "t.json", gzip.compress(b'{"a": [' + b" " * 8_000_000 + b"1]}"))


def test_a_gzip_that_ends_early_gives_its_whole_items(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps({"a": [{"x": i} for i in range(5_000)]}).encode())
    *whole, (_, last) = items(tmp_path / "t.json", packed[: len(packed) // 2])
    assert len(whole) > 500 and isinstance(last, Cut) and last.reason == "the gzip file ends there"


def test_an_item_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "MOST_ITEM_CHARACTERS", 10_000)
    monkeypatch.setattr(json_stream, "_CHUNK_BYTES", 1_000)
    with pytest.raises(InputError, match="a value of more than 10,000 characters"):
        items(tmp_path / "t.json", '{"a": ["' + "x" * 50_000)


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        list(json_items(tmp_path / "none.json", ()))
