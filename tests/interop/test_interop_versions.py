"""The parsers that the interop tests feed are the ones whose entry points they know."""

import re
import sys
from importlib.metadata import distributions, version
from pathlib import Path

import pytest

pytestmark = pytest.mark.interop
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", ["interop.txt", "interop-alone.txt"])
def test_the_installed_parsers_are_the_pinned_ones(file: str) -> None:
    pinned = re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", (ROOT / file).read_text(), re.MULTILINE)
    assert pinned
    assert {name: version(name) for name, _ in pinned} == dict(pinned)


def test_the_older_release_lies_in_a_folder_of_its_own() -> None:
    name, _, pinned = (ROOT / "interop-older.txt").read_text().splitlines()[-1].partition("==")
    assert [found.version for found in distributions(name=name, path=[str(Path(sys.prefix) / "older")])] == [pinned]
