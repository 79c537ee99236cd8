"""How often the P10-P90 intervals of step times hold the measured ones, over the shipped rows; CSV rows on stdout.

    python benchmarks/intervals.py [--append benchmarks/intervals.csv]

Rows are predicted by fits that have not seen their group of sources (`mmplan backtest --leave-one-out`).
`model_error` is the half width, in the logarithm, that has to be added in squares to the ranges of the parameters for
80 % of all rows to lie inside: `MODEL_ERROR` of `mmplan/planner/interval.py`.
"""

import argparse
import csv
import math
import sys
from pathlib import Path

import numpy as np

from mmplan.cost_models.time_rules import Rules
from mmplan.planner.backtest import SHIPPED, PricedRow, backtest, job_estimator
from mmplan.planner.estimate import StepEstimator
from mmplan.planner.interval import MODEL_ERROR, step_interval
from mmplan.planner.leave_one_out import leave_one_out
from mmplan.scenario.scenario import Data, Model

INSIDE = 0.8


def half_width(row: PricedRow, known: dict[tuple[Model, Data], StepEstimator]) -> float:
    """Of the interval from parameters alone, in the logarithm."""
    estimator = job_estimator(row.job, known)

    def seconds(rules: Rules) -> float:
        return estimator.with_rules(rules).estimate(row.job.degrees).step_s

    interval = step_interval(seconds(estimator.rules), estimator.rules, seconds, model_error=0.0)
    return math.log(interval.p90_s / interval.p10_s) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--append", type=Path)
    arguments = parser.parse_args()
    found = leave_one_out(backtest([SHIPPED]))
    assert found is not None
    known: dict[tuple[Model, Data], StepEstimator] = {}
    widths = {id(row): half_width(row, known) for row in found.rows}
    misses = {id(row): abs(math.log(row.estimate.step_s / row.job.step_s)) for row in found.rows}
    extra = [math.sqrt(max(0.0, misses[key] ** 2 - widths[key] ** 2)) for key in misses]
    needed = float(np.quantile(extra, INSIDE))
    rows = []
    for name, group in {"all": found.rows, **found.lineages()}.items():
        miss, width = (np.array([values[id(row)] for row in group]) for values in (misses, widths))
        rows.append(
            {
                "rows": name,
                "n": len(group),
                "inside_by_parameters": f"{np.mean(miss <= width):.3f}",
                "inside": f"{np.mean(miss <= np.hypot(width, MODEL_ERROR)):.3f}",
                "median_half_width": f"{np.median(np.hypot(width, MODEL_ERROR)):.3f}",
                "model_error": f"{needed:.4f}" if name == "all" else "",
            }
        )
    for stream in [sys.stdout, *([arguments.append.open("a", newline="")] if arguments.append else [])]:
        writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
