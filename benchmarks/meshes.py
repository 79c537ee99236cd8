"""What ranks of their own for encoders bring, on the shipped scenarios and on clusters of unlike devices.

    python benchmarks/meshes.py [-o benchmarks/meshes.csv] [SCENARIO...]

Each scenario is planned twice, with one chunk of layers per rank: with all modules on one mesh (encoders may be spread
over it), and with meshes of their own besides. `gain` is how much shorter the closed form gets, 0 where the search
proves that no plan with meshes is better by more than the gap of 0.2 %. CPU seconds are of both searches. Rows
`... on H100 + A100` put the scenario on half its nodes of H100 and as many of A100 (80 GB), rows `... on N nodes` on so
many of its own.
"""

import argparse
import csv
import sys
import time
from dataclasses import replace
from pathlib import Path

from mmplan.errors import MmplanError
from mmplan.planner.result import OptimizeResult
from mmplan.planner.search import optimize
from mmplan.scenario.catalogue import catalogue_device, catalogue_link
from mmplan.scenario.cluster import Pool
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

ROOT = Path(__file__).parents[1]
GAP = 0.002
LIMIT_S = 300.0
# Clusters whose size is no power of two leave devices that one mesh cannot use, or uses badly.
ODD_NODES = {"internvl2.5-26b": 3, "llava-ov-7b": 3, "pixtral-12b": 5}
MIXED = ("qwen2-vl-72b", "internvl2.5-26b", "qwen2.5-omni-7b", "llama-3.2-11b-vision")
FIELDS = ("scenario", "devices", "shared_s", "shared_gap", "meshes_s", "meshes_gap", "gain", "meshes", "looked_at")
FIELDS += ("shared_cpu_s", "cpu_s")


def planned(scenario: Scenario, *, meshes: bool) -> tuple[OptimizeResult, float]:
    rules = replace(scenario.constraints, modules=None if meshes else ())
    started = time.process_time()
    result = optimize(replace(scenario, constraints=rules), gap=GAP, time_limit_s=LIMIT_S)
    return result, time.process_time() - started


def mixed(scenario: Scenario) -> Scenario:
    (pool, *_) = scenario.cluster.pools
    pools = tuple(
        Pool(
            device=catalogue_device(name).device,
            nodes=max(1, pool.nodes // 2),
            devices_per_node=pool.devices_per_node if pool.nodes > 1 else pool.devices_per_node // 2,
            node_link=catalogue_link(catalogue_device(name).node_link),
        )
        for name in ("h100-sxm", "a100-sxm-80")
    )
    return replace(
        scenario, name=f"{scenario.name} on H100 + A100", cluster=replace(scenario.cluster, name="mixed", pools=pools)
    )


def resized(scenario: Scenario, nodes: int) -> Scenario:
    (pool,) = scenario.cluster.pools
    cluster = replace(scenario.cluster, pools=(replace(pool, nodes=nodes),))
    return replace(scenario, name=f"{scenario.name} on {nodes} nodes", cluster=cluster)


def row(scenario: Scenario) -> dict[str, object]:
    shared, shared_cpu_s = planned(scenario, meshes=False)
    found, cpu_s = planned(scenario, meshes=True)
    before, after = (one.plan.certificate for one in (shared, found))
    texts = [f"{' + '.join(mesh.modules)}: {mesh} from rank {mesh.first_rank}" for mesh in found.plan.meshes]
    return {
        "scenario": scenario.name,
        "devices": scenario.cluster.device_count,
        "shared_s": f"{before.objective_s:.6g}",
        "shared_gap": f"{before.gap:.4%}",
        "meshes_s": f"{after.objective_s:.6g}",
        "meshes_gap": f"{after.gap:.4%}",
        "gain": f"{1 - after.objective_s / before.objective_s:.2%}",
        "meshes": "; ".join(texts),
        "looked_at": found.considered.enumerated - shared.considered.enumerated,
        "shared_cpu_s": f"{shared_cpu_s:.2f}",
        "cpu_s": f"{cpu_s:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".csv"))
    options = parser.parse_args()
    names = options.scenarios or sorted(path.stem for path in (ROOT / "scenarios").glob("*.yaml"))
    scenarios = [load_scenario(ROOT / "scenarios" / f"{name}.yaml") for name in names]
    scenarios += [resized(one, ODD_NODES[one.name]) for one in scenarios if one.name in ODD_NODES]
    scenarios += [mixed(load_scenario(ROOT / "scenarios" / f"{name}.yaml")) for name in MIXED if name in names]
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for scenario in scenarios:
            try:
                writer.writerow(row(scenario))
            except MmplanError as error:
                print(f"{scenario.name}: {error}", file=sys.stderr)
            file.flush()


if __name__ == "__main__":
    main()
