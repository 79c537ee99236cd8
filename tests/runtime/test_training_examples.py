"""The python blocks of the pages on training run as they stand, on two processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("compression.md", "shard_tensor.md")
BLOCKS = [
    (page, number, block)
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    )
]


@pytest.mark.distributed
@pytest.mark.parametrize(("page", "number", "block"), BLOCKS, ids=[f"{page} {number}" for page, number, _ in BLOCKS])
def test_the_example_runs_on_two_processes(
    page: str, number: int, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "example.py"
    file.write_text(block)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, cwd=tmp_path)
    if "terminate called without an active exception" in result.stderr:  # threads of gloo, when a process has ended
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
