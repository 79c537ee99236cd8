"""500 random plans through every exporter and back by a reader of our own (tests/planner/read_back.py).

    python benchmarks/exports.py [COUNT]        # prints a table and rewrites benchmarks/exports.csv

A plan that a target has no word for is refused; `refused_for` are the three most frequent reasons, numbers left out.
"""

import re
import sys
import time
from collections import Counter

from measured import MACHINE, ROOT, write_rows

from mmplan.errors import CheckError

sys.path.insert(0, str(ROOT / "tests" / "planner"))

from random_plans import random_plan
from read_back import EXPORTERS, read_back


def measure(target: str, count: int) -> dict[str, object]:
    refused: Counter[str] = Counter()
    same = changed = 0
    prices: list[float] = []
    started = time.process_time()
    for seed in range(count):
        plan = random_plan(seed)
        try:
            made = EXPORTERS[target](plan)
        except CheckError as refusal:
            refused[re.sub(r"[\d.]+", "#", str(refusal))[:90]] += 1
            continue
        read_back(target, plan, made)  # AssertionError: the files say other than the plan
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
    rows = []
    for target in EXPORTERS:
        rows.append(measure(target, count))
        print(*list(rows[-1].values())[:-1], sep="\t", flush=True)
    write_rows("exports.csv", rows)


if __name__ == "__main__":
    main()
