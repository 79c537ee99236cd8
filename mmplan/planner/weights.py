"""What ranks count for in an objective: one each, or the price of their pool, in whole numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from mmplan.planner.configuration import Configuration
from mmplan.planner.first_bounds import NEVER
from mmplan.planner.quantise import floor_weight
from mmplan.planner.upsets import IntArray
from mmplan.scenario.cluster import Cluster

# A step of a day on all ranks has a value; weight x ns is divided by as much as that needs.
LONGEST_NS = 10**14
# Of all ranks together: keeps products in 63 bits. Prices that need more keep 7 digits at 100,000 devices.
MOST_WEIGHT = 2**38


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Weights:
    """Of the first n ranks: `first[n]`; of any n ranks at least: `least[n]`. Values are weight x ns / `divisor`."""

    first: IntArray
    least: IntArray
    divisor: int

    def of(self, configuration: Configuration) -> int:
        """Of the ranks that work in it."""
        return sum(int(self.first[end] - self.first[begin]) for begin, end in configuration.spans)

    @property
    def most_ns(self) -> int:
        """The longest step that has a value on all ranks."""
        return NEVER * self.divisor // (int(self.first[-1]) + 1)


def device_weights(cluster: Cluster) -> Weights:
    """Every rank counts once."""
    return _weights([1] * len(cluster.pools), cluster)


def price_weights(cluster: Cluster) -> Weights:
    """A rank counts what a device of its pool costs, alike in every order of the pools."""
    exact = [Fraction(str(pool.price_per_hour)) for pool in cluster.pools]
    unit = lcm(*(price.denominator for price in exact))
    whole = [int(price * unit) for price in exact]
    common = gcd(*whole)
    whole = [price // common for price in whole]
    total = sum(price * pool.device_count for price, pool in zip(whole, cluster.pools, strict=True))
    if total > MOST_WEIGHT:
        whole = [floor_weight(price, MOST_WEIGHT, total) for price in whole]
    return _weights(whole, cluster)


def _weights(of_pools: Sequence[int], cluster: Cluster) -> Weights:
    counts = [pool.device_count for pool in cluster.pools]
    each = np.repeat(np.array(of_pools, dtype=np.int64), counts)
    first, least = (np.concatenate([[0], np.cumsum(ranks)]) for ranks in (each, np.sort(each)))
    return Weights(first=first, least=least, divisor=-(-(int(first[-1]) + 1) * LONGEST_NS // NEVER))
