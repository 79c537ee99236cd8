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
    """The value of a step of t ns on so many ranks, if t is at most `most_ns`, which is what the user says where
    `limited`: t, or t * ranks where `weighted`, and `per_rank` for each rank. `ranks`: of each configuration."""

    ranks: IntArray
    most_ns: int
    weighted: bool = False
    per_rank: int = 0
    limited: bool = False

    def value(self, index: int, step_ns: int) -> int:
        """Of a configuration; NEVER where the step is too long."""
        return self.value_on(int(self.ranks[index]), step_ns)

    def value_on(self, ranks: int, step_ns: int) -> int:
        """On so many ranks."""
        return (ranks if self.weighted else 1) * step_ns + ranks * self.per_rank if step_ns <= self.most_ns else NEVER

    def values(self, step_ns: IntArray) -> IntArray:
        """Of all configurations; NEVER stays NEVER."""
        return self.values_on(self.ranks, step_ns)

    def values_on(self, ranks: IntArray, step_ns: IntArray) -> IntArray:
        """On so many ranks each."""
        allowed = step_ns <= self.most_ns
        found: IntArray = np.where(allowed, step_ns, 0)
        if self.weighted:
            found *= ranks
        if self.per_rank:
            found += ranks * self.per_rank
        found[~allowed] = NEVER
        return found

    def step_below(self, index: int, value: int) -> int:
        """The least step time of a configuration whose value is not below `value`: a cutoff, exclusive."""
        return self.step_below_on(int(self.ranks[index]), value)

    def step_below_on(self, ranks: int, value: int) -> int:
        """On so many ranks."""
        allowed = -(-(value - ranks * self.per_rank) // (ranks if self.weighted else 1))
        return max(1, min(allowed, self.most_ns + 1))


def scale_of(objective: Objective, configurations: Configurations, devices: int) -> Scale:
    """The objective in whole numbers, for configurations of at most so many devices."""
    ranks = configurations.ranks
    match objective.name:
        case "device-time":
            return Scale(ranks=ranks, weighted=True, most_ns=NEVER // (1 + devices))
        case "devices":
            assert objective.deadline_s is not None
            most_ns = int(objective.deadline_s * NS_PER_S)
            return Scale(ranks=ranks, per_rank=most_ns + 1, most_ns=most_ns, limited=True)
    return Scale(ranks=ranks, most_ns=NEVER - 1)


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
