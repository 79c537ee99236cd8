"""Time and gap of `mmplan optimize` on every shipped scenario, as whole commands.

    python benchmarks/optimize.py            # prints a table and rewrites benchmarks/optimize.csv

Each row is the faster of two runs; `gap` and `objective_s` are the same in all of them.
"""

import csv
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
REPEATS = 2


def measure(scenario: Path) -> dict[str, object]:
    """One row: wall seconds of the whole command, and what it found."""
    walls = []
    with TemporaryDirectory() as folder:
        plan = str(Path(folder) / "plan.json")
        command = [sys.executable, "-m", "mmplan", "optimize", str(scenario), "-o", plan, "--json", "-"]
        for _ in range(REPEATS):
            started = time.perf_counter()
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            walls.append(time.perf_counter() - started)
    found = json.loads(result.stdout)
    summary = found["summary"]
    return {
        "scenario": scenario.stem,
        "devices": summary["devices"],
        "configurations": found["considered"]["enumerated"],
        "solved": found["considered"]["solved"],
        "objective_s": f"{found['objective_s']:.6g}",
        "simulated_s": f"{summary['step_time_s']:.6g}",
        "gap": f"{found['gap']:.4%}",
        "wall_s": f"{min(walls):.2f}",
        "command": f"mmplan optimize scenarios/{scenario.name}",
        "machine": f"{os.cpu_count()} cores {platform.machine()}, Python {platform.python_version()}",
    }


def main() -> None:
    rows = []
    for scenario in sorted((ROOT / "scenarios").glob("*.yaml")):
        rows.append(measure(scenario))
        print(*(f"{value}" for value in list(rows[-1].values())[:8]), sep="\t")
    with (ROOT / "benchmarks" / "optimize.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
