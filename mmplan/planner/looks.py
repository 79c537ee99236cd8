"""Looks at configurations by the million: one at all of them, closer ones where the search comes near.

Where there are many, each look is taken in two halves, by processes of their own where there are two cores. The halves
are always the same, so that what they find does not hang on the machine: layouts are dealt by their degrees, as equal
degrees share most prices.
"""

from dataclasses import dataclass, field

import numpy as np

from mmplan.planner.bounds import Known, lower_bounds
from mmplan.planner.configurations import Configurations
from mmplan.planner.contract import GroupGraph
from mmplan.planner.first_tables import FirstTables, Part, first_tables
from mmplan.planner.pricing import Prices
from mmplan.planner.second_process import Second
from mmplan.planner.upsets import BoolArray, IntArray

MANY = 200_000  # configurations, whose looks take about a second


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Half:
    """What one process knows."""

    prices: Prices
    groups: GroupGraph
    configurations: Configurations
    known: Known = field(default_factory=Known)

    def tables(self, part: Part) -> FirstTables:
        return first_tables(self.prices, self.configurations, part)

    def closer(self, rows: IntArray) -> IntArray:
        """[2, rows] the step and the busiest stage at least."""
        some = [self.configurations[row] for row in rows.tolist()]
        found = lower_bounds(self.prices, self.groups, some, self.known)
        return np.stack([found.step_ns, found.busiest_ns])


class Looks:
    """Those of one search space."""

    def __init__(self, prices: Prices, groups: GroupGraph, configurations: Configurations) -> None:
        self._many = len(configurations) >= MANY
        self._base, self._turn = configurations.base, _turns(configurations)
        own = self._own = _Half(prices=prices, groups=groups, configurations=configurations)

        def answer(rows: IntArray | None) -> FirstTables | IntArray:
            return own.tables(1) if rows is None else own.closer(rows)

        self._second = Second[IntArray | None, FirstTables | IntArray](answer, worth=self._many)

    def tables(self) -> FirstTables:
        """For the first look at all."""
        if not self._many:
            return self._own.tables(None)
        self._second.ask(None)
        ours, theirs = self._own.tables(0), self._second.told()
        assert isinstance(theirs, FirstTables)
        return ours + theirs

    def closer(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """[rows] the step and the busiest stage of each at least, see `lower_bounds`."""
        theirs = self._turn[self._base[rows]] if self._many else np.zeros(len(rows), dtype=np.bool_)
        found = np.empty((2, len(rows)), dtype=np.int64)
        if theirs.any():
            self._second.ask(rows[theirs])
        found[:, ~theirs] = self._own.closer(rows[~theirs])
        if theirs.any():
            told = self._second.told()
            assert isinstance(told, np.ndarray)
            found[:, theirs] = told
        return found[0], found[1]


def _turns(configurations: Configurations) -> BoolArray:
    """[base] whether it is in the second half: degrees of which one is doubled or halved are not in the same one."""
    degrees = ((base.tp, base.cp, base.ep, base.etp) for base in configurations.bases)
    return np.array([sum(map(int.bit_length, one)) % 2 for one in degrees], dtype=np.bool_)
