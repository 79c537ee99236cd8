"""Fit the physical numbers of the cost model to the shipped rows of split `fit`; writes mmplan/scenario/fitted.yaml.

python benchmarks/fit_parameters.py            # about two minutes on one core
python benchmarks/fit_parameters.py --dry-run  # print only
"""

import argparse
import logging
from pathlib import Path

import numpy as np

import mmplan.scenario.fitted as fitted
from mmplan.planner.backtest import SHIPPED, job_estimator
from mmplan.planner.estimate import StepEstimator
from mmplan.planner.fit_table import PARAMETERS
from mmplan.planner.measured import read_measured
from mmplan.planner.parameter_fit import Fit, RowModel, fit_parameters
from mmplan.planner.row_job import RowJob, row_job

TARGET = Path(fitted.__file__).with_name("fitted.yaml")
_HEADER = "# name: [value, relative standard error, rows]; written by benchmarks/fit_parameters.py\n"


def shipped_model() -> RowModel:
    """All shipped rows that can be priced."""
    jobs = [job for job in map(row_job, read_measured(SHIPPED)) if isinstance(job, RowJob)]
    known: dict[object, StepEstimator] = {}
    return RowModel(jobs, [job_estimator(job, known) for job in jobs])  # type: ignore[arg-type]


def written(fit: Fit) -> str:
    lines = [
        f"{name}: [{value:.4g}, {fit.uncertainty[name]:.2g}, {fit.rows[name]}]\n" for name, value in fit.values.items()
    ]
    return _HEADER + "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    model = shipped_model()
    fit_rows = np.array([index for index, job in enumerate(model.jobs) if job.row.split == "fit"])
    fit = fit_parameters(model, PARAMETERS, fit_rows)
    text = written(fit)
    logging.info(text)
    residuals = model.residuals(fit.values)
    for split in ("fit", "held-out"):
        errors = np.abs(np.expm1(residuals[[job.row.split == split for job in model.jobs]]))
        logging.info(
            "%s: n %d, median %.1f %%, p90 %.1f %%", split, errors.size, *100 * np.quantile(errors, (0.5, 0.9))
        )
    if not arguments.dry_run:
        TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
