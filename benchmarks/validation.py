"""What `mmplan validate --calibrate` gains: predicted over measured, before and after, seen and held out; CSV rows.

    python benchmarks/validation.py      # rewrites benchmarks/validation.csv

`scenarios/tiny.yaml` under four plans on this machine's CPU. Each run in turn corrects the catalogue's prices, and its
step and those of all other plans are predicted again. Steps are the fastest of 8 after the first. Computes that share
a core take longer than any price says: `load` is the load average before the run, run it on a quiet machine.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

from measured import MACHINE, ROOT, write_rows

from mmplan.planner.plan import Plan
from mmplan.planner.search import optimize
from mmplan.report.schedules import under_schedule
from mmplan.runtime.launch import execute
from mmplan.runtime.measurement import Measurement
from mmplan.runtime.refine import refine
from mmplan.runtime.reprice import reprice
from mmplan.scenario.load import load_scenario

STEPS = 9
TRIES = 1  # of each plan; the fastest step of all counts


def plans() -> dict[str, Plan]:
    scenario = load_scenario(ROOT / "scenarios" / "tiny.yaml")

    def made(pp: int, microbatch: int, recompute: str = "none") -> Plan:
        constraints = replace(
            scenario.constraints, pp=(pp,), dp=(1,), tp=(1,), recompute=(recompute,), microbatch=(microbatch,)
        )
        return optimize(replace(scenario, constraints=constraints), time_limit_s=20).plan

    return {
        "1 process, microbatches of 1": made(1, 1),
        "1 process, microbatches of 4": made(1, 4),
        "1 process, all recomputed": made(1, 1, "full"),
        "2 processes, gpipe": under_schedule(made(2, 1), "gpipe"),
    }


def fastest(plan: Plan) -> tuple[Measurement, float]:
    """The run with the fastest step, and the least load before one of them."""
    runs, loads = [], []
    for _ in range(TRIES):
        loads.append(os.getloadavg()[0])
        run = execute(plan, steps=STEPS, local=plan.rank_count)
        assert run is not None
        runs.append(run)
    return min(runs, key=lambda run: run.step_time_s), min(loads)


def main() -> None:
    made = plans()
    runs = {name: fastest(plan) for name, plan in made.items()}
    rows: list[dict[str, object]] = []
    for seen, plan in made.items():
        profile = refine(plan, runs[seen][0], Path("run.json"))
        for name, other in made.items():
            run, load = runs[name]
            found = reprice(other, run, profile, Path("p.yaml"), name=name, held_out=name != seen)
            rows.append(
                {
                    "calibrated_by": seen,
                    "predicted": name,
                    "held_out": found.held_out,
                    "measured_s": f"{found.measured_s:.5f}",
                    "before_s": f"{found.before_s:.5f}",
                    "after_s": f"{found.after_s:.5f}",
                    "error_before": f"{found.error_before:+.3f}",
                    "error_after": f"{found.error_after:+.3f}",
                    "load": f"{load:.1f}",
                    "machine": MACHINE,
                    "torch": run.torch_version,
                }
            )
            print(", ".join(str(value) for value in rows[-1].values()), flush=True)
    for held_out in (False, True):
        own = [row for row in rows if row["held_out"] == held_out]
        errors = [median(abs(float(str(row[key]))) for row in own) for key in ("error_before", "error_after")]
        print(f"held out {held_out}: median error {errors[0]:.1%} before, {errors[1]:.1%} after", file=sys.stderr)
    write_rows("validation.csv", rows)


if __name__ == "__main__":
    main()
