"""Predicted against measured step times: rows of tables priced with one set of parameters, errors per source, ranking
inside sweeps."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmplan.cost_models.time_rules import scenario_rules
from mmplan.errors import MmplanError
from mmplan.planner.estimate import StepEstimate, StepEstimator
from mmplan.planner.measured import MeasuredRow, read_measured
from mmplan.planner.row_job import RowJob, Unpriced, row_job
from mmplan.scenario.scenario import Data, Model

SHIPPED = Path(__file__).with_name("data") / "measured.csv"

# Sources that tell of the same runs, or of the same recipes in another release: left out together.
_LINEAGES = (
    (r"grok", "Grok DGXC"),
    (r"maxtext|paxml", "JAX DGXC"),
    (r"gb200", "NeMo GB200"),
    (r"dgx cloud", "NeMo DGXC"),
    (r"nemo|mlperf", "NeMo tables"),
    (r"bloom|bigscience", "BLOOM"),
    (r"korthikanti|activation recomputation|mt-nlg", "Megatron 530B"),
    (r"vtrain", "vTrain"),
    (r"zero bubble|vocabulary parallelism", "Zero Bubble"),
    (r"foundry", "LLM Foundry"),
)


@dataclass(frozen=True, slots=True)
class PricedRow:
    """A row with its estimate."""

    job: RowJob
    estimate: StepEstimate

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.estimate.step_s / self.job.step_s - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Errors and ranking of some rows.

    Attributes:
        bias: median of the signed errors.
        tau: mean over sweeps of Kendall's tau, None without sweeps.
        regret: mean over sweeps of measured time of the predicted-best row over the best one, minus 1.
    """

    n: int
    median_ape: float
    p90_ape: float
    worst: float
    bias: float
    tau: float | None
    regret: float | None
    sweeps: int


@dataclass(frozen=True, slots=True)
class Backtest:
    """All rows of the tables, in their order."""

    priced: tuple[PricedRow, ...]
    unpriced: tuple[Unpriced, ...]

    def rows(self) -> tuple[MeasuredRow, ...]:
        """All rows as read."""
        return (*(row.job.row for row in self.priced), *(row.row for row in self.unpriced))

    def sources(self) -> dict[str, tuple[PricedRow, ...]]:
        """Rows by source, in the order of first appearance."""
        found: dict[str, list[PricedRow]] = {}
        for row in self.priced:
            found.setdefault(row.job.row.source, []).append(row)
        return {name: tuple(rows) for name, rows in found.items()}


def backtest(paths: Sequence[Path]) -> Backtest:
    """Price every row of the tables.

    Raises:
        InputError: a table is malformed; one sentence with file and line.
    """
    return backtest_rows([row for path in paths for row in read_measured(path)])


def backtest_rows(rows: Sequence[MeasuredRow]) -> Backtest:
    """Price rows; those that cannot be priced are kept with the reason."""
    priced: list[PricedRow] = []
    unpriced: list[Unpriced] = []
    estimators: dict[tuple[Model, Data], StepEstimator] = {}
    for row in rows:
        job = row_job(row)
        if isinstance(job, Unpriced):
            unpriced.append(job)
            continue
        try:
            estimator = job_estimator(job, estimators)
            priced.append(PricedRow(job, estimator.estimate(job.degrees)))
        except MmplanError as error:
            unpriced.append(Unpriced(row, str(error)))
    return Backtest(tuple(priced), tuple(unpriced))


def job_estimator(job: RowJob, known: dict[tuple[Model, Data], StepEstimator]) -> StepEstimator:
    """The estimator of a job; graphs of equal models are built once."""
    key = (job.scenario.model, job.scenario.data)
    if key not in known:
        known[key] = StepEstimator(job.scenario)
    return known[key].with_rules(scenario_rules(job.scenario))


def lineage(row: MeasuredRow) -> str:
    """The group of sources a row belongs to: what is left out together."""
    said = f"{row.text('model')} {row.text('source')}"
    for pattern, name in _LINEAGES:
        if re.search(pattern, said):
            return name
    return row.source


def scores(rows: Sequence[PricedRow]) -> Scores | None:
    """Errors of rows; None without rows."""
    if not rows:
        return None
    errors = np.array([row.error for row in rows])
    sizes = np.abs(errors)
    groups = sweeps(rows)
    pairs = [_pairs(group) for group in groups]
    taus = [(agree - differ) / (agree + differ) for agree, differ in pairs if agree + differ]
    regrets = [_regret(group) for group in groups]
    return Scores(
        n=len(rows),
        median_ape=float(np.median(sizes)),
        p90_ape=float(np.quantile(sizes, 0.9)),
        worst=float(errors[sizes.argmax()]),
        bias=float(np.median(errors)),
        tau=float(np.mean(taus)) if taus else None,
        regret=float(np.mean(regrets)) if regrets else None,
        sweeps=len(groups),
    )


def sweeps(rows: Sequence[PricedRow]) -> tuple[tuple[PricedRow, ...], ...]:
    """Rows of one source that train the same model on the same GPUs with the same batch, in more than one way."""
    groups: dict[tuple[object, ...], list[PricedRow]] = {}
    for row in rows:
        job, numbers = row.job, row.job.row.numbers
        dims = tuple(numbers.get(name) for name in ("layers", "hidden", "sequence", "gpus", "global_batch"))
        key = (job.row.source, job.row.text("model"), job.row.text("gpu"), job.row.text("precision"), *dims)
        groups.setdefault(key, []).append(row)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _pairs(group: tuple[PricedRow, ...]) -> tuple[int, int]:
    """(pairs in the same order, pairs in opposite order); equal times count for neither."""
    agree = differ = 0
    for index, first in enumerate(group):
        for second in group[:index]:
            measured = first.job.step_s - second.job.step_s
            predicted = first.estimate.step_s - second.estimate.step_s
            if measured * predicted > 0:
                agree += 1
            elif measured * predicted < 0:
                differ += 1
    return agree, differ


def _regret(group: tuple[PricedRow, ...]) -> float:
    chosen = min(group, key=lambda row: row.estimate.step_s)
    return chosen.job.step_s / min(row.job.step_s for row in group) - 1
