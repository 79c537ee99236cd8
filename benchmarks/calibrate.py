"""Predicted over measured step time of small plans on this machine, before and after `mmplan calibrate`; CSV rows.

    python benchmarks/calibrate.py [--quick] [--append benchmarks/calibrate.csv]

`scenarios/tiny.yaml` runs on one process and as a pipeline of two. The fastest step of the run is compared with the
simulation of that step's samples: with the catalogue's device, with one that microbenchmarks measured, and with one
refined by the run of the other plan. Run it on a quiet machine: `load` is the load average before each run.
"""

import argparse
import csv
import os
import sys
from dataclasses import replace
from pathlib import Path

from mmplan.planner.interval import plan_interval
from mmplan.planner.plan import Plan, scenario_hash
from mmplan.planner.search import optimize
from mmplan.report.simulation import simulate_plan
from mmplan.runtime.calibrate import calibrate
from mmplan.runtime.launch import execute
from mmplan.runtime.measurement import Measurement
from mmplan.runtime.refine import refine
from mmplan.scenario.load import load_scenario
from mmplan.scenario.profile import Profile, profile_device, profile_link

SCENARIO = Path(__file__).parents[1] / "scenarios" / "tiny.yaml"
PROCESSES = (1, 2)
STEPS = 12


def tiny_plan(processes: int) -> Plan:
    """A pipeline over so many processes."""
    scenario = load_scenario(SCENARIO)
    constraints = replace(scenario.constraints, pp=(processes,), dp=(1,), tp=(1,))
    return optimize(replace(scenario, constraints=constraints), time_limit_s=10).plan


def on_profile(plan: Plan, profile: Profile) -> Plan:
    """The same cut on the device and link of a profile."""
    pool = plan.scenario.cluster.pools[0]
    link = profile_link(profile, "profile") or pool.node_link
    pool = replace(pool, device=profile_device(profile, "profile"), node_link=link)
    scenario = replace(plan.scenario, cluster=replace(plan.scenario.cluster, pools=(pool,)))
    return replace(plan, scenario=scenario, scenario_hash=scenario_hash(scenario))


def table_row(plan: Plan, kind: str, processes: int, run: Measurement, load: float) -> dict[str, object]:
    predicted_s = simulate_plan(plan, run.recorded_step).step_time_s
    interval = plan_interval(plan, predicted_s)
    return {
        "scenario": plan.scenario.name,
        "processes": processes,
        "numbers": kind,
        "measured_s": f"{run.step_time_s:.5f}",
        "predicted_s": f"{predicted_s:.5f}",
        "predicted_over_measured": f"{predicted_s / run.step_time_s:.3f}",
        "p10_s": f"{interval.p10_s:.5f}",
        "p90_s": f"{interval.p90_s:.5f}",
        "inside": interval.p10_s <= run.step_time_s <= interval.p90_s,
        "load": f"{load:.1f}",
        "cores": os.cpu_count(),
        "torch": run.torch_version,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--append", type=Path)
    arguments = parser.parse_args()
    profile = calibrate(device="cpu", quick=arguments.quick, local=2)
    plans = {processes: tiny_plan(processes) for processes in PROCESSES}
    runs, loads, refined = {}, {}, {}
    for processes, plan in plans.items():
        loads[processes] = os.getloadavg()[0]
        run = execute(on_profile(plan, profile), steps=STEPS, local=processes)
        assert run is not None
        runs[processes] = run
        refined[processes] = refine(on_profile(plan, profile), run, Path("run.json"))
    rows = []
    for processes, plan in plans.items():
        (other,) = set(PROCESSES) - {processes}
        kinds = {
            "catalogue": plan,
            "calibrated": on_profile(plan, profile),
            f"refined by the run on {other}": on_profile(plan, refined[other]),
        }
        rows += [table_row(plan, kind, processes, runs[processes], loads[processes]) for kind, plan in kinds.items()]
    fresh = arguments.append is not None and not arguments.append.exists()
    streams = [(sys.stdout, True)]
    streams += [(arguments.append.open("a", newline=""), fresh)] if arguments.append is not None else []
    for stream, headed in streams:
        writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
        if headed:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
