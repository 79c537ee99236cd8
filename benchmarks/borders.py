"""Seconds of the ways in which features cross between unlike meshes, and rows between the ranks of one, by the cost
model, over links and widths.

    python benchmarks/borders.py     # writes benchmarks/borders.csv, handovers.csv; seconds of CPU, nothing is measured

borders.csv: features of 197 x 1024 for each sample of 4, in bf16, there and back, from encoders on ranks of their own
in other nodes of eight H100 to a group of a language model, over tp or cp. Links between nodes: InfiniBand as in the
catalogue, the same where a message starts 10 times as late, and 10 Gb/s Ethernet.

handovers.csv: on ranks of these nodes that cut images and text alike (cp), there and back, 512 frames of width 1,280
that are averaged by 4 (gathered in front of the projector, or pooled where they lie), and 4 x 197 features of width
4,096 that take their places in the text (gathered, or each to the rank with its place).
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.graph import Edge
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.load import Load
from mmplan.planner.border import WAYS, quickest, ways_s
from mmplan.planner.mesh import Mesh
from mmplan.scenario.cluster import Link
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

ROOT = Path(__file__).resolve().parents[1]
SAMPLES, TOKENS, STRIDE = 4, 197, 4
HANDOVERS = ["link", "cp", "rows", "bytes", "gathered_us", "pooled_or_placed_us"]
EDGE = Edge(
    producer="vision.0",
    consumer="llm.0",
    width=1024,
    load_module="vision",
    load_field="outputs",
    carries_grad=True,
    placed="vision",
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
    cuts = [(wide, 1) for wide in (2, 4, 8)] + [(1, wide) for wide in (2, 4, 8)]
    for (name, link), (tp, dp), (wide, cp) in product(links.items(), ((1, 1), (1, 4), (2, 1), (4, 1)), cuts):
        cluster = replace(base.cluster, network_link=link)
        costs = AnalyticCostModel(replace(base, cluster=cluster))
        source = Mesh(modules=("vision",), tp=tp, dp=dp, first_rank=wide * cp)
        target = Mesh(modules=(), tp=wide, cp=cp, dp=1, first_rank=0)
        loads = {"vision": Load(outputs=TOKENS * SAMPLES / dp)}
        layouts = Layout(tp=tp, dp=dp), Layout(tp=wide, cp=cp)
        seconds = ways_s(costs, EDGE, loads, "bf16", (source, target), layouts, near=False)
        told = [f"{seconds[way] * 1e6:.1f}" if way in seconds else "" for way in WAYS]
        rows.append([name, tp, dp, wide, cp, *told, quickest(seconds)])
    ends = ["link", "encoder_tp", "encoder_dp", "language_tp", "language_cp"]
    head = [*ends, *(f"{way}_us" for way in WAYS), "quickest"]
    _write("borders.csv", [head, *rows])
    _write("handovers.csv", [HANDOVERS, *_handovers(base, links)])


def _handovers(base: Scenario, links: dict[str, Link]) -> Iterator[list[object]]:
    inside = [("inside a node", base.cluster.network_link, cp) for cp in (2, 4, 8)]
    for name, link, cp in [*inside, *((*one, 16) for one in links.items())]:
        costs = AnalyticCostModel(replace(base, cluster=replace(base.cluster, network_link=link)))
        layout, frames, features = Layout(cp=cp), 512 * 1280 * 2, SAMPLES * TOKENS * 4096 * 2
        pooled_s = 2 * costs.make_whole_s(frames / STRIDE, layout)[0]
        yield [name, cp, "512 frames averaged by 4", frames, *_us(costs.make_whole_s(frames, layout)[1], pooled_s)]
        placed_s = 2 * costs.place_rows_s(features, layout)
        yield [name, cp, "features among text", features, *_us(costs.make_whole_s(features, layout)[1], placed_s)]


def _us(gathered_s: float, other_s: float) -> list[str]:
    return [f"{seconds * 1e6:.1f}" for seconds in (gathered_s, other_s)]


def _write(name: str, rows: Iterable[Sequence[object]]) -> None:
    with (ROOT / "benchmarks" / name).open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
