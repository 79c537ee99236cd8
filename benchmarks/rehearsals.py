"""Bubbles of 8 ranks, measured in rehearsals against the simulation, under every schedule that fits; CSV rows.

    python benchmarks/rehearsals.py [CASE ...]      # rows of these cases in benchmarks/rehearsals.csv are made anew

Computes are sleeps, a mean forward of 30 ms; tensors of the real sizes go over gloo. A run has six steps: the fastest
of the last five is compared with the simulation of its own samples. `load` is the load average before the run: other
work on the machine makes sleeps end late.
"""

import csv
import os
import sys
from dataclasses import replace

from measured import MACHINE, ROOT, write_rows

from mmplan.planner.plan import Plan
from mmplan.planner.search import optimize
from mmplan.report.schedules import under_schedule
from mmplan.runtime.launch import execute
from mmplan.runtime.validate import validate
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.schedule_names import ScheduleName

RANKS, STEPS, UNIT_S = 8, 6, 0.03
FILE = "rehearsals.csv"
CASES: dict[str, tuple[str, ScheduleName]] = {
    **{f"chain {name}": ("chain", name) for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")},
    **{f"dag {name}": ("tiny-rehearsal", name) for name in ("gpipe", "1f1b", "interleaved", "encoders-ahead", "zb-h1")},
    "dag optimized": ("tiny-rehearsal", "optimized"),
}


def scenario_of(name: str) -> Scenario:
    """`chain`: the language model of the other one alone, with samples of one length; a chain of equal layers."""
    scenario = load_scenario(ROOT / "scenarios" / "tiny-rehearsal.yaml")
    if name != "chain":
        return scenario
    return load_scenario(ROOT / "benchmarks" / "rehearsal-chain.yaml")


def plan_of(case: str) -> Plan:
    scenario, schedule = CASES[case]
    found = scenario_of(scenario)
    constraints = replace(found.constraints, pp=(RANKS,), dp=(1,), tp=(1,))
    return under_schedule(optimize(replace(found, constraints=constraints), time_limit_s=20).plan, schedule)


def row_of(case: str) -> dict[str, object]:
    plan, load = plan_of(case), os.getloadavg()[0]
    run = execute(plan, steps=STEPS, local=RANKS, rehearse=True, unit_s=UNIT_S)
    assert run is not None
    validation = validate(plan, run)
    bubbles = {row.rank: row for row in validation.rows if row.quantity == "bubble"}
    whole, found = bubbles.pop(None), validation.decomposition
    worst = max(abs(row.difference) for row in bubbles.values())
    return {
        "case": case,
        "scenario": plan.scenario.name,
        "schedule": plan.schedule,
        "ranks": RANKS,
        "stages": len(plan.stages),
        "microbatches": plan.microbatches,
        "unit_ms": f"{UNIT_S * 1e3:.0f}",
        "predicted_bubble": f"{whole.planned:.4f}",
        "measured_bubble": f"{whole.measured:.4f}",
        "difference_points": f"{100 * whole.difference:.2f}",
        "worst_rank_points": f"{100 * worst:.2f}",
        "predicted_step_s": f"{found.planned_s:.3f}",
        "measured_step_s": f"{found.measured_s:.3f}",
        "compute_ms": f"{found.compute_s * 1e3:.1f}",
        "bubble_ms": f"{found.bubble_s * 1e3:.1f}",
        "communication_ms": f"{found.communication_s * 1e3:.1f}",
        "other_ms": f"{found.other_s * 1e3:.1f}",
        "within_2_points": abs(whole.difference) <= 0.02,
        "load": f"{load:.1f}",
        "machine": MACHINE,
    }


def known_rows() -> dict[str, dict[str, str]]:
    path = ROOT / "benchmarks" / FILE
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {row["case"]: row for row in csv.DictReader(file)}


def main(cases: list[str]) -> None:
    for case in cases or CASES:
        row = row_of(case)
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows = {**known_rows(), case: row}
        write_rows(FILE, [rows[name] for name in CASES if name in rows])


if __name__ == "__main__":
    main(sys.argv[1:])
