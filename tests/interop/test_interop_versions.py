"""The parsers that the interop tests feed are the ones whose entry points they know."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.interop
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", ["interop.txt", "interop-alone.txt"])
def test_the_installed_parsers_are_the_pinned_ones(file: str) -> None:
    pinned = re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", (ROOT / file).read_text(), re.MULTILINE)
    assert pinned
    assert {name: version(name) for name, _ in pinned} == dict(pinned)
