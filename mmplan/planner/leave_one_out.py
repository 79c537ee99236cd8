"""Each lineage of sources predicted with parameters fitted to all others: what to expect of a source never seen."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmplan.planner.backtest import Backtest, PricedRow, job_estimator, lineage
from mmplan.planner.estimate import StepEstimator
from mmplan.planner.fit_table import PARAMETERS
from mmplan.planner.parameter_fit import RowModel, leave_out
from mmplan.scenario.fitted import fitted_numbers
from mmplan.scenario.scenario import Data, Model

_LEAST_ROWS = 20  # below that a fit says nothing; the whole table is then left as it is


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rows with the estimates of the fits that have not seen their lineage."""

    rows: tuple[PricedRow, ...]

    def lineages(self) -> dict[str, tuple[PricedRow, ...]]:
        found: dict[str, list[PricedRow]] = {}
        for row in self.rows:
            found.setdefault(lineage(row.job.row), []).append(row)
        return {name: tuple(rows) for name, rows in found.items()}


def leave_one_out(result: Backtest) -> LeftOut | None:
    """The rows of a backtest, each lineage under a fit to the other ones; None with too few rows or one lineage."""
    jobs = [row.job for row in result.priced]
    groups = [lineage(job.row) for job in jobs]
    if len(jobs) < _LEAST_ROWS or len(set(groups)) < 2:
        return None
    known: dict[tuple[Model, Data], StepEstimator] = {}
    model = RowModel(jobs, [job_estimator(job, known) for job in jobs])
    fitted = {name: number.value for name, number in fitted_numbers().items()}
    residuals = leave_out(model, PARAMETERS, fitted, groups)
    return LeftOut(_with_errors(result.priced, np.exp(residuals)))


def _with_errors(rows: Sequence[PricedRow], ratios: np.ndarray) -> tuple[PricedRow, ...]:
    return tuple(
        replace(row, estimate=replace(row.estimate, step_s=row.job.step_s * float(ratio)))
        for row, ratio in zip(rows, ratios, strict=True)
    )
