"""Configurations in the order of their lower bounds, which are sharpened only where the search comes near them."""

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from mmplan.planner.bounds import NEVER, lower_bounds
from mmplan.planner.configurations import Configurations
from mmplan.planner.contract import GroupGraph
from mmplan.planner.first_bounds import FirstBounds
from mmplan.planner.pricing import Prices
from mmplan.planner.upsets import BoolArray, IntArray

# Configurations sharpened at once: few at first, as the first ones often decide.
FIRST_BLOCK, LARGEST_BLOCK = 64, 2048


@dataclass(kw_only=True, slots=True, eq=False)
class Bounds:
    """Per configuration: the step takes at least `step_ns`, NEVER where no cut fits into memory; with any memory at
    least `roomy_ns`; the busiest stage works at least `busiest_ns` per microbatch. Sharp where `sharp`."""

    prices: Prices
    groups: GroupGraph
    configurations: Configurations
    step_ns: IntArray
    roomy_ns: IntArray
    busiest_ns: IntArray
    sharp: BoolArray

    @classmethod
    def of(cls, prices: Prices, groups: GroupGraph, configurations: Configurations, first: FirstBounds) -> "Bounds":
        """Those of the first look."""
        count = len(configurations)
        return cls(
            prices=prices,
            groups=groups,
            configurations=configurations,
            step_ns=first.step_ns.copy(),
            roomy_ns=first.roomy_ns,
            busiest_ns=np.zeros(count, dtype=np.int64),
            sharp=np.zeros(count, dtype=np.bool_),
        )

    def sharpen(self, rows: IntArray) -> None:
        """Look closer at some rows."""
        open_rows = rows[~self.sharp[rows] & (self.step_ns[rows] != NEVER)]
        if len(open_rows):
            found = lower_bounds(self.prices, self.groups, [self.configurations[row] for row in open_rows])
            self.step_ns[open_rows] = np.maximum(self.step_ns[open_rows], found.step_ns)
            self.busiest_ns[open_rows] = found.busiest_ns
        self.sharp[rows] = True


class Frontier:
    """Hands out configurations, the least sharp bound first; equal ones in the order of the list."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._order = np.argsort(bounds.step_ns, kind="stable")
        self._position = 0
        self._block = FIRST_BLOCK
        self._heap: list[tuple[int, int]] = []  # sharp bound, configuration

    def least_ns(self) -> int:
        """No configuration left has a shorter step; NEVER where none is left that may fit."""
        self._sharpen()
        return self._heap[0][0] if self._heap else NEVER

    def pop(self) -> int:
        """The next configuration."""
        self._sharpen()
        return heappop(self._heap)[1]

    def _sharpen(self) -> None:
        """Until no blunt bound is below the least sharp one."""
        step_ns, count = self._bounds.step_ns, len(self._order)
        while self._position < count:
            blunt_ns = int(step_ns[self._order[self._position]])
            if blunt_ns == NEVER or (self._heap and self._heap[0][0] <= blunt_ns):
                return
            rows = self._order[self._position : self._position + self._block]
            self._position += len(rows)
            self._block = min(2 * self._block, LARGEST_BLOCK)
            self._bounds.sharpen(rows)
            for row in rows.tolist():
                if step_ns[row] != NEVER:
                    heappush(self._heap, (int(step_ns[row]), row))
