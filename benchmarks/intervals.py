"""How often the P10-P90 intervals of step times hold the measured ones, over the shipped rows; CSV rows on stdout.

    python benchmarks/intervals.py [--append benchmarks/intervals.csv]

`held out`: rows of sources that were never fitted, on software stacks that were. `left out`: all rows, each predicted
by a fit that has not seen its group of sources (`mmplan backtest --leave-one-out`), as on a stack without such rows.
`model_error` is the half width, in the logarithm, that has to be added in squares to the ranges of the parameters for
80 % of the rows to lie inside: `MODEL_ERROR` and `UNSEEN_MODEL_ERROR` of `mmplan/planner/interval.py`.
"""

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmplan.cost_models.time_rules import Rules
from mmplan.planner.backtest import SHIPPED, PricedRow, backtest, job_estimator
from mmplan.planner.estimate import StepEstimator
from mmplan.planner.interval import MODEL_ERROR, UNSEEN_MODEL_ERROR, step_interval
from mmplan.planner.leave_one_out import leave_one_out
from mmplan.scenario.scenario import Data, Model

INSIDE = 0.8


def half_width(row: PricedRow, known: dict[tuple[Model, Data], StepEstimator]) -> float:
    """Of the interval from parameters alone, in the logarithm."""
    estimator = job_estimator(row.job, known)

    def seconds(rules: Rules) -> float:
        return estimator.with_rules(rules).estimate(row.job.degrees).step_s

    interval = step_interval(seconds(estimator.rules), (estimator.rules,), seconds, model_error=0.0)
    return math.log(interval.p90_s / interval.p10_s) / 2


def table_row(
    name: str, group: Sequence[PricedRow], error: float, known: dict[tuple[Model, Data], StepEstimator]
) -> dict[str, object]:
    """Coverage of one group of rows."""
    width = np.array([half_width(row, known) for row in group])
    miss = np.array([abs(math.log(row.estimate.step_s / row.job.step_s)) for row in group])
    needed = np.quantile(np.sqrt(np.maximum(0.0, miss**2 - width**2)), INSIDE)
    return {
        "rows": name,
        "n": len(group),
        "inside_by_parameters": f"{np.mean(miss <= width):.3f}",
        "inside": f"{np.mean(miss <= np.hypot(width, error)):.3f}",
        "median_half_width": f"{np.median(np.hypot(width, error)):.3f}",
        "model_error": f"{needed:.4f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--append", type=Path)
    arguments = parser.parse_args()
    result = backtest([SHIPPED])
    found = leave_one_out(result)
    assert found is not None
    held_out = [row for row in result.priced if row.job.row.split == "held-out"]
    known: dict[tuple[Model, Data], StepEstimator] = {}
    groups = {"held out": (held_out, MODEL_ERROR), "left out": (found.rows, UNSEEN_MODEL_ERROR)}
    groups |= {f"left out: {name}": (rows, UNSEEN_MODEL_ERROR) for name, rows in found.lineages().items()}
    rows = [table_row(name, group, error, known) for name, (group, error) in groups.items()]
    for stream in [sys.stdout, *([arguments.append.open("a", newline="")] if arguments.append else [])]:
        writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
