"""Configurations in the order of their lower bounds, which are sharpened only where the search comes near them."""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from mmplan.planner.bounds import NEVER
from mmplan.planner.first_bounds import FirstBounds
from mmplan.planner.looks import Looks
from mmplan.planner.objective import Scale
from mmplan.planner.stopping import never
from mmplan.planner.upsets import BoolArray, IntArray

# Configurations sharpened at once: few at first, as the first ones often decide.
FIRST_BLOCK, LARGEST_BLOCK = 64, 512


@dataclass(kw_only=True, slots=True, eq=False)
class Bounds:
    """Per configuration: the step takes at least `step_ns`, NEVER where no cut fits into memory; with any memory at
    least `roomy_ns`; the busiest stage works at least `busiest_ns` per microbatch. Sharp where `sharp`."""

    looks: Looks
    step_ns: IntArray
    roomy_ns: IntArray
    busiest_ns: IntArray
    sharp: BoolArray

    @classmethod
    def of(cls, looks: Looks, first: FirstBounds) -> "Bounds":
        """Those of the first look."""
        count = len(first.step_ns)
        return cls(
            looks=looks,
            step_ns=first.step_ns.copy(),
            roomy_ns=first.roomy_ns,
            busiest_ns=np.zeros(count, dtype=np.int64),
            sharp=np.zeros(count, dtype=np.bool_),
        )

    def sharpen(self, rows: IntArray) -> None:
        """Look closer at some rows."""
        open_rows = rows[~self.sharp[rows] & (self.step_ns[rows] != NEVER)]
        if len(open_rows):
            step_ns, self.busiest_ns[open_rows] = self.looks.closer(open_rows)
            self.step_ns[open_rows] = np.maximum(self.step_ns[open_rows], step_ns)
        self.sharp[rows] = True


class Frontier:
    """Hands out configurations, the one with the least value of its sharp bound first; equal ones as listed.

    Args:
        rows: which, in ascending order; all by default.
        stop: asked before bounds are sharpened; once it says so the order is that of what is known.
    """

    def __init__(
        self, bounds: Bounds, scale: Scale, rows: IntArray | None = None, stop: Callable[[], bool] = never
    ) -> None:
        self._bounds, self._scale, self._stop = bounds, scale, stop
        self._values = scale.values(bounds.step_ns)
        own = self._values if rows is None else self._values[rows]
        order = np.argsort(own, kind="stable")
        self._order = order if rows is None else rows[order]
        self._position = 0
        self._block = FIRST_BLOCK
        self._heap: list[tuple[int, int]] = []  # value of the sharp bound, configuration

    def least_value(self) -> int:
        """No configuration left has a lower one; NEVER where none is left that may fit."""
        self._sharpen()
        return self.known_value()

    def known_value(self) -> int:
        """The same without looking closer at anything."""
        return min(self._heap[0][0] if self._heap else NEVER, self._blunt_value())

    def pop(self) -> int:
        """The next configuration, behind `least_value`."""
        return heappop(self._heap)[1]

    def _blunt_value(self) -> int:
        return int(self._values[self._order[self._position]]) if self._position < len(self._order) else NEVER

    def _sharpen(self) -> None:
        """Until no blunt bound is below the least sharp one."""
        while not self._stop():
            blunt = self._blunt_value()
            if blunt == NEVER or (self._heap and self._heap[0][0] <= blunt):
                return
            rows = self._order[self._position : self._position + self._block]
            self._bounds.sharpen(rows)
            self._position += len(rows)
            self._block = min(2 * self._block, LARGEST_BLOCK)
            for row in rows.tolist():
                value = self._scale.value(row, int(self._bounds.step_ns[row]))
                if value != NEVER:
                    heappush(self._heap, (value, row))
