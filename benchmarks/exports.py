"""Random plans through every exporter: how many are written as they are, changed at a price or refused, and read back.

    python benchmarks/exports.py [--plans 500] [--target jax ...]

Plans are those of tests/planner/random_plans.py; for Accelerate, which has no pipelines, the same on one stage, and for
Cornstarch, whose stages belong to one modality, cut so. `same`: what is read back has the plan's layers, ranks, degrees
and batch; targets without a reader here are read back by their own parsers in tests/interop. Rewrites the rows of these
targets in benchmarks/exports.csv.
"""

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Callable

from measured import ROOT, write_rows

sys.path[:0] = [str(ROOT / "tests" / "planner"), str(ROOT / "tests" / "runtime")]

from export_readers import READERS  # noqa: E402
from random_plans import random_plan  # noqa: E402
from shaped_plans import flat_plan, modal_plan  # noqa: E402

from mmplan.commands.export_targets import TARGETS, exported  # noqa: E402
from mmplan.errors import CheckError  # noqa: E402
from mmplan.planner.plan import Plan  # noqa: E402

ROWS = "exports.csv"
SHAPES: dict[str, Callable[[int], Plan]] = {"accelerate": flat_plan, "cornstarch": modal_plan}


def row(target: str, plans: int) -> dict[str, object]:
    """Counts over the plans of seeds from 0 on."""
    counts: Counter[str] = Counter()
    shape, reader = SHAPES.get(target, random_plan), READERS.get(target)
    for seed in range(plans):
        plan = shape(seed)
        try:
            made = exported(plan, target)
        except CheckError:
            counts["refused"] += 1
            continue
        counts["changed" if made.losses else "as it is"] += 1
        counts["priced"] += bool(made.losses) and all(loss.step_s is not None for loss in made.losses)
        if reader is not None:
            same = reader(plan, made)
            counts["same"] += same
            if not same:
                print(f"{target}: plan {seed} reads back otherwise")
    written = counts["as it is"] + counts["changed"]
    return {
        "target": target,
        "plans": plans,
        "as_it_is": counts["as it is"],
        "changed": counts["changed"],
        "all_changes_priced": counts["priced"],
        "refused": counts["refused"],
        "read_back": written if reader is not None else "",
        "same": counts["same"] if reader is not None else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=int, default=500)
    parser.add_argument("--target", action="append", choices=TARGETS)
    options = parser.parse_args()
    chosen = options.target or list(TARGETS)
    path = ROOT / "benchmarks" / ROWS
    rows: dict[str, dict[str, object]] = {}
    if path.exists():
        with path.open(newline="") as file:
            rows = {one["target"]: dict(one) for one in csv.DictReader(file)}
    for target in chosen:
        rows[target] = row(target, options.plans)
        print(rows[target])
    write_rows(ROWS, [rows[target] for target in TARGETS if target in rows])


if __name__ == "__main__":
    main()
