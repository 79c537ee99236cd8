"""The search against trying everything, on random jobs of one to three modalities with zones and unlike devices.

    python benchmarks/brute_force.py [-o benchmarks/brute_force.csv] [--jobs 500] [--wider 150] [--priced 100]

At most 12 layers in 9 pieces, at most 8 devices; several chunks per rank and experts among the configurations.
Memory is drawn around what each job needs, and jobs are drawn until so many have a plan; those without one have to be
proved infeasible. `wider` jobs, of at most 7 pieces: states, weights or activations in host memory, cp by ring and by
all-to-all, score matrices and their recomputation, GPipe, split rows. `priced` jobs, of as many, have two pools with
prices: there the least cost is tried and searched, and `best_s` is the step in which the ranks of the plan
(`price_per_hour` of all) cost as much.
`equal`: the plan's closed form (of `priced` jobs its cost) is the least over all pool orders, configurations and cuts,
up to the launch of one operator; `bounded`: the proven bound is not above it; `gap`: between the two of the plan.
"""

import argparse
import csv
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "planner"))

from pipeline_toys import DEVICE  # noqa: E402
from random_jobs import (  # noqa: E402
    MOST_GROUPS,
    alike,
    around_its_need,
    best_by_trying,
    groups_of,
    price_per_hour,
    priced_job,
    random_job,
    wider_job,
)

from mmplan.cost_models.build import build_graph  # noqa: E402
from mmplan.errors import InfeasibleError  # noqa: E402
from mmplan.planner import plan_cost  # noqa: E402
from mmplan.planner.objective import STEP_TIME, Objective  # noqa: E402
from mmplan.planner.search import optimize  # noqa: E402
from mmplan.scenario.scenario import Scenario  # noqa: E402

MOST_WIDER = 7  # each technique is tried by itself
ROUNDING = 1e-12  # of sums of doubles


JOBS = {"random": random_job, "wider": wider_job, "priced": priced_job}


def row(seed: int, job: Scenario, kind: str) -> dict[str, object]:
    priced = kind == "priced"
    best_s, tried = best_by_trying(job, price_per_hour if priced else alike)
    started = time.perf_counter()
    try:
        plan = optimize(job, gap=0.0, objective=Objective(name="cost") if priced else STEP_TIME).plan
        certificate = plan.certificate
    except InfeasibleError:
        plan = certificate = None
    wall_s = time.perf_counter() - started
    price = plan_cost.price_per_hour(plan) if priced and plan is not None else None
    if price is not None and best_s is not None:
        best_s /= price
    return {
        "seed": seed,
        "jobs": kind,
        "layers": len(build_graph(job).layers()),
        "pieces": groups_of(job),
        "modalities": len({module.modality for module in job.model.modules}),
        "devices": job.cluster.device_count,
        "pools": len(job.cluster.pools),
        "zone": len(job.constraints.no_split),
        "tried": tried,
        "best_s": "" if best_s is None else f"{best_s:.9f}",
        "found_s": "" if certificate is None else f"{certificate.objective_s:.9f}",
        "bound_s": "" if certificate is None else f"{certificate.bound_s:.9f}",
        "equal": abs(certificate.objective_s - best_s) <= DEVICE.launch_s
        if certificate is not None and best_s is not None
        else certificate is None and best_s is None,
        "gap": "" if certificate is None else f"{certificate.gap:.7f}",
        "bounded": certificate is None or best_s is None or certificate.bound_s <= best_s * (1 + ROUNDING),
        "offload": "" if plan is None else plan.scenario.technique.offload,
        "cp": "" if plan is None else plan.cp,
        "price_per_hour": "" if price is None else f"{price:.2f}",
        "wall_s": f"{wall_s:.3f}",
    }


def jobs(kind: str, pieces: int) -> Iterator[tuple[int, Scenario]]:
    """Seeds and jobs of at most so many pieces that have a configuration, memory around their need."""
    for seed in itertools.count():
        drawn = JOBS[kind](seed)
        if groups_of(drawn) <= pieces and (job := around_its_need(drawn, seed)) is not None:
            yield seed, job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--wider", type=int, default=150)
    parser.add_argument("--priced", type=int, default=100)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for count, kind, pieces in (
        (options.jobs, "random", MOST_GROUPS),
        (options.wider, "wider", MOST_WIDER),
        (options.priced, "priced", MOST_WIDER),
    ):
        planned = 0
        for seed, job in jobs(kind, pieces):
            if planned == count:
                break
            rows.append(row(seed, job, kind))
            planned += rows[-1]["best_s"] != ""
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    equal, bounded = (sum(bool(one[key]) for one in rows) for key in ("equal", "bounded"))
    gaps = [float(str(one["gap"])) for one in rows if one["best_s"] != ""]
    wide = sum(gap > 0.001 for gap in gaps)
    print(f"{len(rows)} jobs, {len(gaps)} with a plan: {equal} equal, {bounded} with a valid bound")
    print(f"gaps above 0.1 %: {wide}, the widest {max(gaps, default=0.0):.2%}")


if __name__ == "__main__":
    main()
