"""What it brings to run encoders for several microbatches of the language model at once, on shipped scenarios.

    python benchmarks/encode_together.py [SCENARIO ...]  # their rows in benchmarks/encode_together.csv, new or in place

Each scenario is planned twice to a gap of 1 %: as it is, and with `constraints.encode_together: any` (1, 2, 4 or 8).
Seconds are of the closed form and of the simulation of mean microbatches; `gain`: of the simulated step.
"""

import argparse
import csv
from dataclasses import replace

from measured import MACHINE, ROOT, write_rows

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.result import OptimizeResult
from mmplan.planner.search import optimize
from mmplan.planner.simulate import simulate
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

SCENARIOS = ("llava-1.5-7b-pretrain", "llava-ov-7b", "qwen2-vl-7b", "internvl2.5-26b", "internvl2.5-78b", "pixtral-12b")
SCENARIOS += ("qwen2-audio-7b", "whisper-llama3-8b", "qwen2.5-omni-7b", "vitl16-llama3-8b", "tiny")
LIMIT_S = 60.0


def simulated_s(result: OptimizeResult, scenario: Scenario) -> float:
    return simulate(result.plan, build_graph(scenario), AnalyticCostModel(result.plan.scenario)).step_time_s


def row(name: str) -> dict[str, object]:
    scenario = load_scenario(ROOT / "scenarios" / f"{name}.yaml")
    free = replace(scenario, constraints=replace(scenario.constraints, encode_together=None))
    alone, together = (optimize(one, gap=0.01, time_limit_s=LIMIT_S) for one in (scenario, free))
    before_s, after_s = simulated_s(alone, scenario), simulated_s(together, scenario)
    return {
        "scenario": name,
        "devices": scenario.cluster.device_count,
        "alone": str(alone.configuration),
        "together": str(together.configuration),
        "batch_factor": together.plan.batch_factor,
        "alone_s": f"{alone.plan.certificate.objective_s:.6f}",
        "together_s": f"{together.plan.certificate.objective_s:.6f}",
        "together_bound_s": f"{together.bound_s:.6f}",
        "gap": f"{together.gap:.4f}",
        "alone_simulated_s": f"{before_s:.6f}",
        "together_simulated_s": f"{after_s:.6f}",
        "gain": f"{1 - after_s / before_s:.4f}",
        "alone_wall_s": f"{alone.wall_s:.1f}",
        "together_wall_s": f"{together.wall_s:.1f}",
        "command": f"python benchmarks/encode_together.py {name}",
        "machine": MACHINE,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenarios", nargs="*", default=SCENARIOS)
    options = parser.parse_args()
    file = ROOT / "benchmarks" / "encode_together.csv"
    known: dict[str, dict[str, object]] = {}
    if file.exists():
        with file.open(newline="") as text:
            known = {one["scenario"]: dict(one) for one in csv.DictReader(text)}
    for name in options.scenarios:
        known[name] = row(name)
        print(known[name], flush=True)
        write_rows(file.name, list(known.values()))


if __name__ == "__main__":
    main()
