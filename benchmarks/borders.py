"""Seconds of the three ways in which features cross between unlike meshes, by the cost model, over links and widths.

    python benchmarks/borders.py     # writes benchmarks/borders.csv; a second of CPU, nothing is measured

Features of 197 x 1024 for each sample of 4, in bf16, there and back, from encoders on ranks of their own in other nodes
of eight H100 to a tensor-parallel group of a language model. Links between nodes: InfiniBand as in the catalogue, the
same where a message starts 10 times as late, and 10 Gb/s Ethernet.
"""

import csv
from dataclasses import replace
from itertools import product
from pathlib import Path

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.graph import Edge
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.load import Load
from mmplan.planner.border import WAYS, quickest, ways_s
from mmplan.planner.mesh import Mesh
from mmplan.scenario.load import load_scenario

ROOT = Path(__file__).resolve().parents[1]
SAMPLES, TOKENS = 4, 197
EDGE = Edge(
    producer="vision.0", consumer="llm.0", width=1024, load_module="vision", load_field="outputs", carries_grad=True
)


def main() -> None:
    base = load_scenario(ROOT / "scenarios" / "qwen2-vl-72b.yaml")
    found = base.cluster.network_link
    links = {
        "catalogue": found,
        "slow to start": replace(found, latency_s=10 * found.latency_s),
        "10 Gb/s": replace(found, bytes_per_s=1.25e9, latency_s=3e-5),
    }
    rows = []
    for (name, link), (tp, dp), wide in product(links.items(), ((1, 1), (1, 4), (2, 1), (4, 1)), (2, 4, 8)):
        cluster = replace(base.cluster, network_link=link)
        costs = AnalyticCostModel(replace(base, cluster=cluster))
        source = Mesh(modules=("vision",), tp=tp, dp=dp, first_rank=wide)
        target = Mesh(modules=(), tp=wide, dp=1, first_rank=0)
        loads = {"vision": Load(outputs=TOKENS * SAMPLES / dp)}
        layouts = Layout(tp=tp, dp=dp), Layout(tp=wide)
        seconds = ways_s(costs, EDGE, loads, "bf16", (source, target), layouts, near=False)
        told = [f"{seconds[way] * 1e6:.1f}" for way in WAYS]
        rows.append([name, tp, dp, wide, *told, quickest(seconds)])
    with (ROOT / "benchmarks" / "borders.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["link", "encoder_tp", "encoder_dp", "language_tp", *(f"{way}_us" for way in WAYS), "quickest"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
