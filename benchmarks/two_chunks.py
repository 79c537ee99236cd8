"""The default plan in two chunks per rank against the same degrees in one, on shipped scenarios.

    python benchmarks/two_chunks.py [SCENARIO ...]    # prints a table and rewrites benchmarks/two_chunks.csv

`one_chunk_s`: a simulated step under the best schedule with one chunk per rank; `step_s` of the plan that `mmplan
optimize` writes, `schedule` its own; `bound_s`: no plan takes less in any number of chunks and under any schedule
(empty where one chunk is kept).
"""

import sys

from measured import MACHINE, ROOT, write_rows

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.schedules.reschedule import scheduled
from mmplan.planner.search import optimize
from mmplan.planner.simulate import simulate
from mmplan.planner.stopping import SCHEDULE_SEARCH_S
from mmplan.scenario.load import load_scenario

SCENARIOS = ("tiny", "tiny-rehearsal", "internvl2.5-26b", "llava-ov-7b", "pixtral-12b")


def measure(name: str) -> dict[str, object]:
    """One row."""
    plan = optimize(load_scenario(ROOT / "scenarios" / f"{name}.yaml"), schedule_search_s=SCHEDULE_SEARCH_S).plan
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    alone = scheduled(plan.one_chunk, graph, costs, search_s=SCHEDULE_SEARCH_S)
    proof = plan.chunk_certificate
    return {
        "scenario": name,
        "ranks": plan.pp,
        "microbatches": plan.microbatches,
        "one_chunk_s": f"{simulate(alone, graph, costs).step_time_s:.6g}",
        "step_s": f"{simulate(plan, graph, costs).step_time_s:.6g}",
        "chunks": plan.vp,
        "schedule": plan.schedule,
        "bound_s": "" if proof is None else f"{proof.bound_s:.6g}",
        "gap": "" if proof is None else f"{proof.gap:.4%}",
        "closed_form_s": f"{plan.certificate.objective_s:.6g}",
        "closed_form_gap": f"{plan.certificate.gap:.4%}",
        "machine": MACHINE,
    }


def main() -> None:
    rows = []
    for name in sys.argv[1:] or SCENARIOS:
        rows.append(measure(name))
        print(*rows[-1].values(), sep="\t", flush=True)
    if not sys.argv[1:]:
        write_rows("two_chunks.csv", rows)


if __name__ == "__main__":
    main()
