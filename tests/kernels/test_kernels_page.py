"""The examples of docs/kernels.md run as they stand, and there is one for each operator."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kernels.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[re.findall(r"kernels\.(\w+)", block)[0] for block in BLOCKS])
def test_an_example_runs_as_it_stands(block: str) -> None:
    exec(compile(block, "docs/kernels.md", "exec"), {})


def test_every_operator_has_an_example() -> None:
    operators = {
        name
        for file in (ROOT / "mmplan" / "kernels").glob("*.py")
        for name in re.findall(r"^def (\w+)_reference\(", file.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`(\w+)`", PAGE)) | set(re.findall(r"\w+", "".join(BLOCKS)))
    assert operators and operators <= named
