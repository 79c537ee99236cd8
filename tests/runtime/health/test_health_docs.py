"""The example of docs/health.md runs, and its table is that of the rules."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmplan.cli import app
from mmplan.runtime.health.rules import RULES

PAGE = (Path(__file__).parents[3] / "docs" / "health.md").read_text()


def test_the_example_runs_and_the_doctor_reads_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(block, "health.md", "exec"), {"__name__": "example"})
    result = CliRunner().invoke(app, ["doctor", "health.jsonl", "--json", "doctor.json"])
    assert result.exit_code in (0, 1) and "reading" in result.stdout


def test_every_monitor_is_in_the_table() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == RULES.keys()


@pytest.mark.parametrize("monitor", RULES)
def test_the_page_says_what_each_number_is_and_what_to_do(monitor: str) -> None:
    rule = RULES[monitor]
    assert f"| {monitor} | {rule.unit} | {rule.advice} |" in PAGE
