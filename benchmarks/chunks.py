"""What several chunks of layers per pipeline rank are worth: the search with one chunk and with any number.

    python benchmarks/chunks.py [NAME...]    # rewrites benchmarks/chunks.csv

`closed_form_s` of several chunks counts each as long as the busiest; `simulated_s` plays the plan under its own
schedule, none searched for. `cpu_s`: of the search in this process, on a machine that is not quiet.
"""

import sys
import time
from dataclasses import replace

from measured import MACHINE, ROOT, write_rows

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.configuration import CHUNKS
from mmplan.planner.search import optimize
from mmplan.planner.simulate import simulate
from mmplan.scenario.load import load_scenario

NAMES = ("tiny", "qwen2-vl-72b", "internvl3.5-241b")


def row(name: str, chunks: tuple[int, ...]) -> dict[str, object]:
    scenario = load_scenario(ROOT / "scenarios" / f"{name}.yaml")
    scenario = replace(scenario, constraints=replace(scenario.constraints, vp=chunks))
    started_s = time.process_time()
    result = optimize(scenario, time_limit_s=600)
    cpu_s = time.process_time() - started_s
    step_s = simulate(result.plan, build_graph(scenario), AnalyticCostModel(scenario)).step_time_s
    return {
        "scenario": name,
        "chunks": "any" if chunks == CHUNKS else "one",
        "configurations": result.considered.enumerated,
        "solved": result.considered.solved,
        "plan": str(result.configuration),
        "closed_form_s": f"{result.plan.certificate.objective_s:.6g}",
        "simulated_s": f"{step_s:.6g}",
        "gap": f"{result.gap:.4%}",
        "status": result.status,
        "cpu_s": f"{cpu_s:.2f}",
        "machine": MACHINE,
    }


def main() -> None:
    rows = []
    for name in sys.argv[1:] or NAMES:
        for chunks in ((1,), CHUNKS):
            rows.append(row(name, chunks))
            print(*list(rows[-1].values())[:10], sep="\t", flush=True)
    write_rows("chunks.csv", rows)


if __name__ == "__main__":
    main()
