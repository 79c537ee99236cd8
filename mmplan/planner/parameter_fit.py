"""Fits the physical numbers of the cost model to measured steps: per GPU generation, link level and software stack.

There is no parameter per row or per source. Residuals are logarithms of predicted / measured; Gauss-Newton in the
logarithms of the parameters with weights of a Huber loss, and a weak prior at the starting values so that what no row
sees stays where it is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmplan.cost_models.time_rules import Rules
from mmplan.planner.estimate import StepEstimator
from mmplan.planner.row_job import RowJob
from mmplan.scenario.catalogue import starting_value
from mmplan.scenario.stacks import starting_parameters

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
Rows = np.ndarray[tuple[int], np.dtype[np.intp]]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]

_HUBER = 0.03  # residuals below 3 % (rows with equal fields differ by 2-3 %) count squared, larger ones linearly
_ROUNDS = 5
_REPEATS = 25
_CLOSE = 0.02
_STEP = 0.02  # of the logarithm, for differences
_LARGEST_MOVE = 0.4


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number to fit: `generation.NAME.FIELD`, `generation.NAME.attention.KIND`, `link.LEVEL.fraction` or
    `stack.NAME.FIELD`; `spread` is the standard deviation of the prior in the logarithm."""

    name: str
    lower: float
    upper: float
    spread: float


@dataclass(frozen=True, slots=True)
class Fit:
    values: dict[str, float]
    uncertainty: dict[str, float]  # relative standard errors
    rows: dict[str, int]  # rows that each parameter acts on


def starting(name: str) -> float:
    """The value of a parameter before any fit; KeyError when there is none."""
    kind, owner, *path = name.split(".")
    if kind == "stack":
        value: float = getattr(starting_parameters(owner), path[0])
        return value
    return starting_value(name)


def parameter_value(rules: Rules, name: str) -> float | None:
    """The value of a parameter in these rules, None where it has no effect on them."""
    kind, owner, *path = name.split(".")
    if kind == "generation" and rules.device.generation == owner:
        if path[0] == "attention":
            return dict(rules.device.attention)[path[1]] if rules.technique.attention == path[1] else None
        value: float | None = getattr(rules.device, path[0])
        return value
    if kind == "link":
        return (rules.node_link if owner == "node" else rules.network_link).fraction
    if kind == "stack" and rules.technique.stack == owner:
        number: float = getattr(rules.stack, path[0])
        return number
    return None


def with_parameters(rules: Rules, values: Mapping[str, float]) -> Rules:
    """The rules with parameters replaced; those that do not apply are ignored."""
    for name, value in values.items():
        if parameter_value(rules, name) is None:
            continue
        kind, owner, *path = name.split(".")
        if kind == "generation" and path[0] == "attention":
            attention = tuple((k, value if k == path[1] else old) for k, old in rules.device.attention)
            rules = replace(rules, device=replace(rules.device, attention=attention))
        elif kind == "generation":
            rules = replace(rules, device=replace(rules.device, **{path[0]: value}))  # type: ignore[arg-type]
        elif kind == "stack":
            rules = replace(rules, stack=replace(rules.stack, **{path[0]: value}))  # type: ignore[arg-type]
        elif owner == "node":
            rules = replace(rules, node_link=replace(rules.node_link, fraction=value))
        else:
            rules = replace(rules, network_link=replace(rules.network_link, fraction=value))
    return rules


class RowModel:
    """Rows with their estimators: predicted seconds under any values of the parameters."""

    def __init__(self, jobs: Sequence[RowJob], estimators: Sequence[StepEstimator]) -> None:
        self.jobs, self.estimators = tuple(jobs), tuple(estimators)
        self._log_measured = np.array([math.log(job.step_s) for job in jobs])

    def start(self, parameters: Sequence[Parameter]) -> dict[str, float]:
        """Unfitted values of those parameters that act on some row."""
        return {p.name: max(starting(p.name), p.lower) for p in parameters if self.acts_on(p.name).size}

    def residuals(self, values: Mapping[str, float], rows: Rows | None = None) -> Vector:
        """log(predicted / measured) of the rows (all by default)."""
        chosen = list(range(len(self.jobs))) if rows is None else [int(row) for row in rows]
        predicted = [
            self.estimators[row].with_rules(with_parameters(self.estimators[row].rules, values)) for row in chosen
        ]
        seconds = [e.estimate(self.jobs[row].degrees).step_s for e, row in zip(predicted, chosen, strict=True)]
        logs: Vector = np.log(seconds) - self._log_measured[chosen]
        return logs

    def acts_on(self, name: str) -> Rows:
        """Rows that a parameter acts on."""
        acts = [parameter_value(estimator.rules, name) is not None for estimator in self.estimators]
        return np.flatnonzero(acts)

    def jacobian(self, values: Mapping[str, float], base: Vector) -> Matrix:
        """Derivatives of the residuals with respect to the logarithms of the values [row, parameter]."""
        result = np.zeros((len(self.jobs), len(values)))
        for column, (name, value) in enumerate(values.items()):
            rows = self.acts_on(name)
            moved = self.residuals({**values, name: value * math.exp(_STEP)}, rows)
            result[rows, column] = (moved - base[rows]) / _STEP
        return result


@dataclass(frozen=True, slots=True)
class Linearised:
    """Residuals near a point, as a linear function of the logarithms of the parameters."""

    parameters: tuple[Parameter, ...]
    prior: Vector
    point: Vector
    base: Vector
    slopes: Matrix  # [row, parameter]

    def solved(self, rows: Rows) -> tuple[Vector, Matrix]:
        """(logarithms of the values, their covariance) that fit the given rows best.

        Huber weights are found by repetition; the noise of a row is the median residual, 1 % at least.
        """
        slopes, spread = self.slopes[rows], np.array([p.spread for p in self.parameters])
        lower, upper = (np.log([getattr(p, end) for p in self.parameters]) for end in ("lower", "upper"))
        point, covariance = self.point.copy(), np.diag(spread**2)
        for _ in range(_REPEATS):
            residual = self.base[rows] + slopes @ (point - self.point)
            weight = 1 / np.maximum(np.abs(residual), _HUBER)
            scale = max(float(np.median(np.abs(residual))), 0.01)
            weighted = slopes * weight[:, None]
            covariance = np.linalg.inv(weighted.T @ slopes / scale + np.diag(1 / spread**2))
            gradient = weighted.T @ residual / scale + (point - self.prior) / spread**2
            point = np.clip(point - covariance @ gradient, lower, upper)
        return point, covariance

    def named(self, point: Vector) -> dict[str, float]:
        return {p.name: math.exp(x) for p, x in zip(self.parameters, point, strict=True)}


def linearise(
    model: RowModel, parameters: Sequence[Parameter], values: Mapping[str, float] | None = None
) -> Linearised:
    """The residuals of all rows near `values` (where absent: near the unfitted ones)."""
    start = model.start(parameters)
    chosen = tuple(parameter for parameter in parameters if parameter.name in start)
    at = {p.name: float(np.clip((values or {}).get(p.name, start[p.name]), p.lower, p.upper)) for p in chosen}
    base = model.residuals(at)
    return Linearised(
        parameters=chosen,
        prior=np.log([start[p.name] for p in chosen]),
        point=np.log([at[p.name] for p in chosen]),
        base=base,
        slopes=model.jacobian(at, base),
    )


def fit_parameters(model: RowModel, parameters: Sequence[Parameter], rows: Rows, rounds: int = _ROUNDS) -> Fit:
    """Fitted values on the given rows: Gauss-Newton with moves limited to what the linear form can be trusted for."""
    values: dict[str, float] = {}
    linear = linearise(model, parameters)
    point, covariance = linear.solved(rows)
    for _ in range(rounds):
        move = np.clip(point - linear.point, -_LARGEST_MOVE, _LARGEST_MOVE)
        values = linear.named(linear.point + move)
        if float(np.abs(move).max()) < _CLOSE:
            break
        linear = linearise(model, parameters, values)
        point, covariance = linear.solved(rows)
    return Fit(
        values=values,
        uncertainty={p.name: float(math.sqrt(covariance[i, i])) for i, p in enumerate(linear.parameters)},
        rows={p.name: int(np.isin(model.acts_on(p.name), rows).sum()) for p in linear.parameters},
    )


def leave_out(
    model: RowModel, parameters: Sequence[Parameter], values: Mapping[str, float], groups: Sequence[str]
) -> Vector:
    """Residuals of every row under a fit to the rows of all other groups; `values` is where the fit starts.

    Numbers that only the left-out group shows fall back to their unfitted values.
    """
    linear = linearise(model, parameters, values)
    names = np.array(groups)
    residuals = np.zeros(len(groups))
    for name in dict.fromkeys(groups):
        point, _ = linear.solved(np.flatnonzero(names != name))
        left = np.flatnonzero(names == name)
        residuals[left] = model.residuals(linear.named(point), left)
    return residuals
