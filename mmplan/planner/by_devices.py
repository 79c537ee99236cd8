"""The least step of configurations by the number of devices that they have."""

from collections.abc import Iterable, Mapping

import numpy as np

from mmplan.planner.first_bounds import NEVER
from mmplan.planner.upsets import IntArray

StepsByDevices = Mapping[int, int]


def least_by_devices(ranks: IntArray, step_ns: IntArray) -> StepsByDevices:
    """By number of devices the least of their values, NEVER where all are."""
    counts = np.flatnonzero(np.bincount(ranks))  # of millions, without sorting them
    least = np.full(1 + max(counts, default=0), NEVER, dtype=np.int64)
    np.minimum.at(least, ranks, step_ns)
    return dict(zip(counts.tolist(), least[counts].tolist(), strict=True))


def least_within(found: Iterable[StepsByDevices], devices: int | None) -> int:
    """The least on so many devices at most, or on any number."""
    within = (step_ns for steps in found for ranks, step_ns in steps.items() if devices is None or ranks <= devices)
    return min(within, default=NEVER)
