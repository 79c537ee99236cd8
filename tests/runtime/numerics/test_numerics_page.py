"""The example of each part of docs/numerics.md runs, one after the other as they stand."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "numerics.md").read_text()


def test_the_examples_run_and_say_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(compile(block, "numerics.md", "exec"), names)
    told = capsys.readouterr().out
    assert len(blocks) == 7
    assert "b needs more steps" in told
    assert "text is normalised by one sum over all ranks and all modalities: the elements are 70% vision's;" in told
    assert names["curvature"].shape == names["images"].shape and names["vision"].weight.grad is not None
