"""The example of docs/meshes.md runs and prints what it says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_example_prints_the_mesh(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "meshes.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(ROOT)
    exec(compile(code, "meshes.md", "exec"), {})
    assert capsys.readouterr().out.strip() == code.rsplit("# ", 1)[1].strip()
