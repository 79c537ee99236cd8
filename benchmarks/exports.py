"""500 random plans through every exporter and back by our own readers (tests/planner/read_back.py, export_readers.py).

    python benchmarks/exports.py [COUNT [TARGET...]]   # prints a table, rewrites these rows of benchmarks/exports.csv

A plan that a target has no word for is refused; `refused_for` are the three most frequent reasons, numbers left out.
Accelerate has no pipelines and Cornstarch a stage for each modality: they get plans of that shape (shaped_plans.py).
"""

import csv
import re
import sys
import time
from collections import Counter
from collections.abc import Callable

from measured import MACHINE, ROOT, write_rows

from mmplan.errors import CheckError

sys.path.insert(0, str(ROOT / "tests" / "runtime"))
sys.path.insert(0, str(ROOT / "tests" / "planner"))

from export_readers import READERS
from random_plans import random_plan
from read_back import EXPORTERS, read_back
from shaped_plans import flat_plan, modal_plan

from mmplan.commands.export_targets import TARGETS, exported
from mmplan.planner.plan import Plan

SHAPES: dict[str, Callable[[int], Plan]] = {"accelerate": flat_plan, "cornstarch": modal_plan}


def measure(target: str, count: int) -> dict[str, object]:
    refused: Counter[str] = Counter()
    same = changed = 0
    prices: list[float] = []
    started = time.process_time()
    for seed in range(count):
        plan = SHAPES.get(target, random_plan)(seed)
        try:
            made = exported(plan, target)
        except CheckError as refusal:
            refused[re.sub(r"[\d.]+", "#", str(refusal))[:90]] += 1
            continue
        if target in EXPORTERS:
            read_back(target, plan, made)  # AssertionError: the files say other than the plan
        else:
            assert READERS[target](plan, made), seed
        same += not made.losses
        changed += bool(made.losses)
        prices += [loss.step_s / plan.certificate.objective_s for loss in made.losses if loss.step_s is not None]
    prices.sort()
    return {
        "target": target,
        "plans": count,
        "as_they_are": same,
        "changed_and_priced": changed,
        "refused": sum(refused.values()),
        "median_price_of_step": f"{prices[len(prices) // 2]:+.2%}" if prices else "",
        "highest_price_of_step": f"{prices[-1]:+.1%}" if prices else "",
        "refused_for": "; ".join(f"{text} ({times})" for text, times in refused.most_common(3)),
        "seconds": f"{time.process_time() - started:.0f}",
        "machine": MACHINE,
    }


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    rows: dict[str, dict[str, object]] = {}
    path = ROOT / "benchmarks" / "exports.csv"
    if path.exists():
        with path.open(newline="") as file:
            rows = {row["target"]: dict(row) for row in csv.DictReader(file)}
    for target in sys.argv[2:] or TARGETS:
        rows[target] = measure(target, count)
        print(*list(rows[target].values())[:-1], sep="\t", flush=True)
    write_rows("exports.csv", [rows[target] for target in TARGETS if target in rows])


if __name__ == "__main__":
    main()
