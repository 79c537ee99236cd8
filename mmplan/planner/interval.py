"""P10 and P90 of an estimated step: what the errors of the fitted numbers and the unexplained rest make of it.

Errors of parameters are taken as independent, in the logarithm; the rest is the spread that remains when a software
stack is known (fitted rows) or has no row of its own (stacks left out of the fit), in the same table. Of 117 held-out
rows 78 % lie inside, where 80 % should.
"""

import math
from dataclasses import dataclass

from mmplan.planner.degrees import Degrees
from mmplan.planner.estimate import StepEstimator
from mmplan.planner.parameter_fit import parameter_value, with_parameters
from mmplan.scenario.fitted import fitted_numbers

_STEP = 0.02
_NINETIETH = 1.2816  # standard normal quantile of 0.9
# Standard deviation of log(predicted / measured), 1.4826 x median |.| of the shipped rows: 3.3 % where the stack was
# fitted; 6.2 % where groups of sources are left out (`mmplan backtest --leave-one-out`; 12 % for the worst group).
_KNOWN_STACK, _UNKNOWN_STACK = 1.4826 * 0.033, 1.4826 * 0.062


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds; `largest` names the number whose error widens the interval most, None when none is fitted."""

    p10_s: float
    p90_s: float
    largest: str | None


def step_interval(estimator: StepEstimator, degrees: Degrees) -> Interval:
    """P10 to P90 of the step time of one configuration."""
    rules, center_s = estimator.rules, estimator.estimate(degrees).step_s
    variances: dict[str, float] = {}
    for name, number in fitted_numbers().items():
        value = parameter_value(rules, name)
        if value is None:
            continue
        moved = estimator.with_rules(with_parameters(rules, {name: value * math.exp(_STEP)}))
        slope = math.log(moved.estimate(degrees).step_s / center_s) / _STEP
        variances[name] = (slope * number.relative_error) ** 2
    known = any(name.startswith(f"stack.{rules.technique.stack}.") for name in fitted_numbers())
    rest = _KNOWN_STACK if known else _UNKNOWN_STACK
    width = _NINETIETH * math.sqrt(sum(variances.values()) + rest**2)
    largest = max(variances, key=lambda name: variances[name], default=None)
    return Interval(center_s * math.exp(-width), center_s * math.exp(width), largest)
