"""What benchmarks share: a whole `mmplan optimize` and its seconds, the machine, rows as a CSV file."""

import csv
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
MACHINE = f"{os.cpu_count()} cores {platform.machine()}, Python {platform.python_version()}"
REPEATS = 2


def timed_optimize(scenario: Path) -> tuple[dict[str, Any], float]:
    """The document of `mmplan optimize` and the wall seconds of the whole command, the faster of two runs."""
    walls = []
    with TemporaryDirectory() as folder:
        plan = str(Path(folder) / "plan.json")
        command = [sys.executable, "-m", "mmplan", "optimize", str(scenario), "-o", plan, "--json", "-"]
        for _ in range(REPEATS):
            started = time.perf_counter()
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            walls.append(time.perf_counter() - started)
    return json.loads(result.stdout), min(walls)


def write_rows(name: str, rows: Sequence[Mapping[str, object]]) -> None:
    """As `benchmarks/NAME`, with the keys of the first row as header."""
    with (ROOT / "benchmarks" / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
