"""Shift of key and value statistics when attention is sharded by heads.

A rank that normalises, quantises or clips by the statistics of *its* heads sees another distribution than the whole
layer. With Gaussians by moments, the shift of a rank is KL(own heads || all heads) of one modality's keys or values.
Aligned statistics, moments summed over the ranks (count, sum, sum of squares), equal those of the unsharded layer
exactly, and then the divergence between modalities is the same on every rank.
"""

import math
from typing import NamedTuple

from torch import Tensor

from mmplan.runtime.health.rule import Rule

RULE = Rule(
    monitor="kv_shift",
    metric="largest KL divergence over ranks (or would-be ranks) of the Gaussian of one's own heads from that of all "
    "heads, of one modality's keys or values",
    unit="nat",
    limit=0.25,
    fires="above",
    source="ours, between the values an article reports without (0.12, 0.13) and with head sharding (0.38, 0.41)",
    advice="take statistics of keys and values over all heads (all-reduce of count, sum, sum of squares), or deal the "
    "heads out so that every rank has large and small ones",
    certainty=0.75,
    explains=("loss",),
    patience=3,
)

_TINY = 1e-12


class Spread(NamedTuple):
    """Count, sum and sum of squares of numbers; they add up over ranks."""

    numbers: float
    total: float
    squares: float

    def __add__(self, other: object) -> "Spread":
        if not isinstance(other, Spread):
            return NotImplemented
        return Spread(self.numbers + other.numbers, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        return self.total / self.numbers

    @property
    def variance(self) -> float:
        return max(self.squares / self.numbers - self.mean**2, _TINY)


def spread(values: Tensor) -> Spread:
    """Of all numbers of a tensor."""
    exact = values.detach().double()
    return Spread(float(exact.numel()), float(exact.sum()), float(exact.square().sum()))


def divergence(one: Spread, other: Spread) -> float:
    """KL of the Gaussian with the moments of `one` from that of `other`."""
    ratio = one.variance / other.variance
    return 0.5 * (ratio + (one.mean - other.mean) ** 2 / other.variance - 1.0 - math.log(ratio))


def head_parts(values: Tensor, parts: int) -> list[Tensor]:
    """The last dimension of keys [..., heads * dim] as `parts` ranks would hold it."""
    if values.shape[-1] % parts:
        raise ValueError(f"{values.shape[-1]} channels of all heads are no {parts} equal parts")
    return list(values.chunk(parts, dim=-1))
