"""What a search minimises: a step's closed form, weighted by the devices of a configuration, or counted after them."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from mmplan.errors import InputError
from mmplan.planner.configurations import Configurations
from mmplan.planner.first_bounds import NEVER
from mmplan.planner.quantise import NS_PER_S
from mmplan.planner.upsets import IntArray
from mmplan.scenario.document import did_you_mean, listed

ObjectiveName = Literal["step-time", "device-time", "devices", "p90-time"]
OBJECTIVE_NAMES: tuple[ObjectiveName, ...] = get_args(ObjectiveName)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """`step-time`; `device-time`: devices x step time, which is least where tokens per second and device are most, and
    the cost of a token least; `devices`: the fewest with steps of at most `deadline_s`, then the shortest step;
    `p90-time`: the step time, and among plans within the gap the least 90th percentile over drawn steps.

    Raises:
        InputError: `devices` without a deadline, or a deadline elsewhere.
    """

    name: ObjectiveName = "step-time"
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if (self.name == "devices") != (self.deadline_s is not None):
            raise InputError(
                "--objective devices needs --deadline, the longest step allowed"
                if self.deadline_s is None
                else f"--deadline says how few devices may do: use it with --objective devices, not {self.name}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The value of a step of t ns of configuration i: factor[i] * t + offset[i], if t is at most `most_ns`, which
    is what the user says where `limited`."""

    factor: IntArray
    offset: IntArray
    most_ns: int
    limited: bool = False

    def value(self, index: int, step_ns: int) -> int:
        """NEVER where the step is too long."""
        return int(self.factor[index]) * step_ns + int(self.offset[index]) if step_ns <= self.most_ns else NEVER

    def values(self, step_ns: IntArray) -> IntArray:
        """Of all configurations; NEVER stays NEVER."""
        allowed = step_ns <= self.most_ns
        found: IntArray = np.where(allowed, self.factor * np.where(allowed, step_ns, 0) + self.offset, NEVER)
        return found

    def step_below(self, index: int, value: int) -> int:
        """The least step time whose value is not below `value`: a cutoff for the configuration, exclusive."""
        allowed = -(-(value - int(self.offset[index])) // int(self.factor[index]))
        return max(1, min(allowed, self.most_ns + 1))


def scale_of(objective: Objective, configurations: Configurations) -> Scale:
    """The objective in whole numbers."""
    count = len(configurations)
    ones, zeros = np.ones(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    match objective.name:
        case "device-time":
            ranks = configurations.ranks
            return Scale(factor=ranks, offset=zeros, most_ns=NEVER // (1 + int(ranks.max())))
        case "devices":
            assert objective.deadline_s is not None
            most_ns = int(objective.deadline_s * NS_PER_S)
            return Scale(factor=ones, offset=configurations.ranks * (most_ns + 1), most_ns=most_ns, limited=True)
    return Scale(factor=ones, offset=zeros, most_ns=NEVER - 1)


STEP_TIME = Objective()


def objective_of(name: str, deadline_s: float | None = None, *, searched: bool = True) -> Objective:
    """The objective of that name.

    Raises:
        InputError: there is none, the deadline is missing or out of place, or nothing is searched.
    """
    if not searched and (name != STEP_TIME.name or deadline_s is not None):
        raise InputError("--naive does not search, so it takes neither --objective nor --deadline")
    for known in OBJECTIVE_NAMES:
        if known == name:
            return Objective(name=known, deadline_s=deadline_s)
    hint = did_you_mean(name, OBJECTIVE_NAMES)
    raise InputError(f"unknown objective '{name}'{hint or f'; known: {listed(OBJECTIVE_NAMES)}'}")
