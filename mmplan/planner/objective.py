"""What a search minimises: a step's closed form, weighted by the devices of a configuration, or counted after them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from mmplan.errors import InputError
from mmplan.planner.configuration import Configuration
from mmplan.planner.first_bounds import NEVER
from mmplan.planner.quantise import NS_PER_S
from mmplan.planner.upsets import IntArray
from mmplan.planner.weights import Weights, device_weights, price_weights
from mmplan.scenario.cluster import Cluster
from mmplan.scenario.document import did_you_mean, listed

ObjectiveName = Literal["step-time", "device-time", "cost", "devices", "p90-time"]
OBJECTIVE_NAMES: tuple[ObjectiveName, ...] = get_args(ObjectiveName)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """`step-time`; `device-time`: devices x step time, which is least where tokens per second and device are most;
    `cost`: price of the devices x step time, which is least where the cost of a token is; `devices`: the fewest with
    steps of at most `deadline_s`, then the shortest step; `p90-time`: the step time, and among plans within the gap the
    least 90th percentile over drawn steps.

    Raises:
        InputError: `devices` without a deadline, or a deadline elsewhere.
    """

    name: ObjectiveName = "step-time"
    deadline_s: float | None = None

    @property
    def by_step(self) -> bool:
        """Whether a shorter step is better on any number of devices."""
        return self.name in ("step-time", "p90-time")

    def __post_init__(self) -> None:
        if (self.name == "devices") != (self.deadline_s is not None):
            raise InputError(
                "--objective devices needs --deadline, the longest step allowed"
                if self.deadline_s is None
                else f"--deadline says how few devices may do: use it with --objective devices, not {self.name}"
            )
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise InputError(f"--deadline: expected more than 0 s, found {self.deadline_s:g} s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The value of a step of t ns on some ranks, if t is at most `most_ns`, which is what the user says where
    `limited`: t, or t x their weight, and `per_rank` for each of them.

    `ranks`: of each configuration whose modules share one mesh; these begin at rank 0. Of others, whose places are not
    known yet, values are those of the cheapest ranks on the cluster: no configuration on so many has a lower one.
    """

    ranks: IntArray
    most_ns: int
    weights: Weights | None = None
    per_rank: int = 0
    limited: bool = False

    def value(self, index: int, step_ns: int) -> int:
        """Of a configuration of one mesh; NEVER where the step is too long."""
        ranks = int(self.ranks[index])
        return self._value(ranks, self._first(ranks), step_ns)

    def value_of(self, configuration: Configuration, step_ns: int) -> int:
        """Of any configuration."""
        return self._value(configuration.ranks, self._weight(configuration), step_ns)

    def value_on(self, ranks: int, step_ns: int) -> int:
        """On any so many ranks at least."""
        return self._value(ranks, self._least(ranks), step_ns)

    def values(self, step_ns: IntArray) -> IntArray:
        """Of all configurations of one mesh; NEVER stays NEVER."""
        return self._values(self.ranks, None if self.weights is None else self.weights.first, step_ns)

    def values_on(self, ranks: IntArray, step_ns: IntArray) -> IntArray:
        """On any so many ranks each at least."""
        return self._values(ranks, None if self.weights is None else self.weights.least, step_ns)

    def step_below(self, index: int, value: int) -> int:
        """The least step time of a configuration whose value is not below `value`: a cutoff, exclusive."""
        ranks = int(self.ranks[index])
        return self._step_below(ranks, self._first(ranks), value)

    def step_below_of(self, configuration: Configuration, value: int) -> int:
        """Of any configuration."""
        return self._step_below(configuration.ranks, self._weight(configuration), value)

    def step_below_on(self, ranks: int, value: int) -> int:
        """On any so many ranks at most."""
        return self._step_below(ranks, self._least(ranks), value)

    def _first(self, ranks: int) -> int:
        return 1 if self.weights is None else int(self.weights.first[ranks])

    def _least(self, ranks: int) -> int:
        return 1 if self.weights is None else int(self.weights.least[ranks])

    def _weight(self, configuration: Configuration) -> int:
        return 1 if self.weights is None else self.weights.of(configuration)

    @property
    def _divisor(self) -> int:
        return 1 if self.weights is None else self.weights.divisor

    def _value(self, ranks: int, weight: int, step_ns: int) -> int:
        return weight * step_ns // self._divisor + ranks * self.per_rank if step_ns <= self.most_ns else NEVER

    def _values(self, ranks: IntArray, weights: IntArray | None, step_ns: IntArray) -> IntArray:
        allowed = step_ns <= self.most_ns
        found: IntArray = np.where(allowed, step_ns, 0)
        if weights is not None:  # so that no product has more than 63 bits
            whole, rest = np.divmod(found, self._divisor)
            found = weights[ranks] * whole + weights[ranks] * rest // self._divisor
        if self.per_rank:
            found += ranks * self.per_rank
        found[~allowed] = NEVER
        return found

    def _step_below(self, ranks: int, weight: int, value: int) -> int:
        allowed = -(-(value - ranks * self.per_rank) * self._divisor // weight)
        return max(1, min(allowed, self.most_ns + 1))


def scale_of(objective: Objective, cluster: Cluster, ranks: IntArray) -> Scale:
    """The objective in whole numbers on a cluster, which has prices where they are minimised; `ranks` as of `Scale`."""
    match objective.name:
        case "device-time" | "cost":
            weights = device_weights(cluster) if objective.name == "device-time" else price_weights(cluster)
            return Scale(ranks=ranks, weights=weights, most_ns=weights.most_ns)
        case "devices":
            assert objective.deadline_s is not None
            return devices_scale(objective.deadline_s, ranks)
    return Scale(ranks=ranks, most_ns=NEVER - 1)


def devices_scale(deadline_s: float, ranks: IntArray | None = None) -> Scale:
    """Fewer devices first, then the shorter step."""
    most_ns = int(deadline_s * NS_PER_S)
    none = np.zeros(0, dtype=np.int64)
    return Scale(ranks=none if ranks is None else ranks, per_rank=most_ns + 1, most_ns=most_ns, limited=True)


def require_prices(objective: Objective, cluster: Cluster, file: Path | None = None) -> None:
    """Costs need the price of every device.

    Raises:
        InputError: one is missing.
    """
    missing = [index for index, pool in enumerate(cluster.pools) if pool.price_per_hour is None]
    if objective.name == "cost" and missing:
        key = f"cluster.pools.{missing[0]}.price_per_hour" if len(cluster.pools) > 1 else "cluster.price_per_hour"
        name = cluster.pools[missing[0]].device.name
        raise InputError(
            f"this key is missing, and --objective cost needs the price of one hour of one {name}, such as 2.5, in the "
            "currency of all other prices; --objective device-time needs none",
            file=file,
            key=key,
        )


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
