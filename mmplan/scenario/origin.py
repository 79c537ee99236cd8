"""Where each number of a device, a link or a software stack comes from, and how far it may be off.

A range runs from P10 to P90: the true value lies inside it in 8 of 10 cases. Fitted numbers take their standard errors,
measured ones the range of their measurements; data-sheet numbers have none, because what software reaches of them is
another number. An assumed number may be off by as much as the same number, fitted, differs between generations or
stacks, by 15 % at least.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from mmplan.scenario.fitted import Fitted, fitted_numbers

Kind = Literal["datasheet", "assumed", "fitted", "measured"]

P90_DEVIATIONS = 1.2816  # standard deviations from the median of a normal distribution to its P90
_LEAST_ASSUMED = 0.15  # of the logarithm
# Cores: two 256-bit units at 2.5 GHz give 80 GFLOP/s in fp32, two 512-bit units at 3 GHz 192; the catalogue's 110 lies
# between.
OTHER_MACHINE = math.log(1.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Of one parameter: its kind, and its range as multiples of its value."""

    parameter: str  # a field of Device, Link or StackParameters, or attention.KIND
    kind: Kind
    p10: float = 1.0
    p90: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.p10 <= 1 <= self.p90:
            raise ValueError(f"{self.parameter}: expected 0 < p10 <= 1 <= p90, found {self.p10} and {self.p90}")


def origin_of(origins: tuple[Origin, ...], parameter: str) -> Origin:
    """The origin of a parameter; what is not listed is a data-sheet number."""
    listed = [origin for origin in origins if origin.parameter == parameter]
    return listed[0] if listed else Origin(parameter=parameter, kind="datasheet")


def fitted_origin(parameter: str, number: Fitted) -> Origin:
    """Of a number from `fitted.yaml`."""
    return _ranged(parameter, "fitted", P90_DEVIATIONS * number.relative_error)


def assumed_origin(parameter: str) -> Origin:
    """Of a number that nobody measured."""
    return _ranged(parameter, "assumed", max(_LEAST_ASSUMED, P90_DEVIATIONS * _spreads().get(parameter, 0.0)))


def other_machine_origin(parameter: str) -> Origin:
    """Of a number measured on one machine and used for all of its kind."""
    return _ranged(parameter, "assumed", OTHER_MACHINE)


def measured_origin(parameter: str, value: float, p10: float, p90: float) -> Origin:
    """Of a measured number with its range in its own unit."""
    return Origin(parameter=parameter, kind="measured", p10=min(1.0, p10 / value), p90=max(1.0, p90 / value))


def stack_origins(owner: str, starting: Mapping[str, float], defaults: Mapping[str, float]) -> tuple[Origin, ...]:
    """Of a stack's numbers: fitted ones under `owner`'s name, assumed ones where the stack writes another value than
    the default. A default is what the parameter means when a stack does nothing special, and has no range; nor have
    yes and no.
    """
    origins = []
    for name, value in starting.items():
        number = fitted_numbers().get(f"stack.{owner}.{name}")
        if number is not None:
            origins.append(fitted_origin(name, number))
        elif value != defaults[name] and value > 0 and not isinstance(value, bool):
            origins.append(assumed_origin(name))
    return tuple(origins)


def _ranged(parameter: str, kind: Kind, width: float) -> Origin:
    return Origin(parameter=parameter, kind=kind, p10=math.exp(-width), p90=math.exp(width))


@cache
def _spreads() -> dict[str, float]:
    """Standard deviation of the logarithm of each fitted number over the generations or stacks that have it."""
    logs: dict[str, list[float]] = {}
    for name, number in fitted_numbers().items():
        if number.value > 0:
            logs.setdefault(name.split(".", 2)[2], []).append(math.log(number.value))
    return {name: _deviation(values) for name, values in logs.items() if len(values) > 1}


def _deviation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
