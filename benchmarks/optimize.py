"""Time and gap of `mmplan optimize` on every shipped scenario, as whole commands.

    python benchmarks/optimize.py            # prints a table and rewrites benchmarks/optimize.csv

Each row is the faster of two runs; `gap` and `objective_s` are the same in all of them.
"""

from pathlib import Path

from measured import MACHINE, ROOT, timed_optimize, write_rows


def measure(scenario: Path) -> dict[str, object]:
    """One row: wall seconds of the whole command, and what it found."""
    found, wall_s = timed_optimize(scenario)
    summary = found["summary"]
    return {
        "scenario": scenario.stem,
        "devices": summary["devices"],
        "configurations": found["considered"]["enumerated"],
        "solved": found["considered"]["solved"],
        "objective_s": f"{found['objective_s']:.6g}",
        "simulated_s": f"{summary['step_time_s']:.6g}",
        "gap": f"{found['gap']:.4%}",
        "wall_s": f"{wall_s:.2f}",
        "command": f"mmplan optimize scenarios/{scenario.name}",
        "machine": MACHINE,
    }


def main() -> None:
    rows = []
    for scenario in sorted((ROOT / "scenarios").glob("*.yaml")):
        rows.append(measure(scenario))
        print(*(f"{value}" for value in list(rows[-1].values())[:8]), sep="\t")
    write_rows("optimize.csv", rows)


if __name__ == "__main__":
    main()
