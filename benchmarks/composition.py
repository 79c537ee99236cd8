"""Step times of the best plan of each scenario with varied data, by composition of its microbatches.

    python benchmarks/composition.py            # prints a table and rewrites benchmarks/composition.csv

64 steps are drawn; times are simulated, `seconds` is what drawing, composing and pricing all of them took, once.
"""

import time

from measured import MACHINE, ROOT, write_rows

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.composition import COMPOSITIONS
from mmplan.planner.search import optimize
from mmplan.planner.step_times import step_times
from mmplan.scenario.load import load_scenario

SCENARIOS = ("tiny", "internvl2.5-26b", "internvl2.5-78b", "qwen2.5-omni-7b", "llava-ov-7b", "qwen2-vl-7b")
STEPS = 64


def measure(name: str) -> list[dict[str, object]]:
    scenario = load_scenario(ROOT / "scenarios" / f"{name}.yaml")
    plan = optimize(scenario, time_limit_s=10).plan
    started = time.process_time()
    times = step_times(plan, build_graph(scenario), AnalyticCostModel(scenario), steps=STEPS, compositions=COMPOSITIONS)
    seconds = time.process_time() - started
    return [
        {
            "scenario": name,
            "plan": f"pp {plan.pp} x dp {plan.dp} x tp {plan.tp}, {plan.microbatches} x {plan.microbatch_size}",
            "composition": one.composition,
            "mean_s": f"{one.mean_s:.5g}",
            "error_s": f"{one.error_s:.2g}",
            "p95_s": f"{one.quantile_s(0.95):.5g}",
            "p99_s": f"{one.quantile_s(0.99):.5g}",
            "against_in_order": f"{one.mean_s / times[0].mean_s - 1:+.1%}",
            "peak_memory_bytes": one.peak_memory_bytes,
            "fits": one.fits,
            "seconds": f"{seconds:.1f}",
            "machine": MACHINE,
        }
        for one in times
    ]


def main() -> None:
    rows = []
    for name in SCENARIOS:
        for row in measure(name):
            rows.append(row)
            print(*(f"{value}" for value in list(row.values())[:-1]), sep="\t", flush=True)
    write_rows("composition.csv", rows)


if __name__ == "__main__":
    main()
