"""The one place where seconds and bytes become the solvers' integers.

Times round down, so that the least objective over integers, divided by 1e9, is a proven bound of the real one; each
layer loses less than 1 ns of some 100 us. The plan that is found is scored with the real seconds. Memory demands round
up and capacities down, so that what fits in integers fits.
"""

import math

import numpy as np
import numpy.typing as npt

NS_PER_S = 1_000_000_000
# Real seconds are whole nanoseconds up to 1 ns per layer: a gap below this is zero.
ROUNDING_GAP = 1e-5


def floor_ns(seconds: float) -> int:
    """Whole nanoseconds that are not more."""
    return math.floor(seconds * NS_PER_S)


def floors_ns(durations_s: npt.NDArray[np.float64]) -> tuple[int, ...]:
    """`floor_ns` of each."""
    return tuple(map(int, np.floor(durations_s * NS_PER_S).tolist()))


def seconds(ns: int) -> float:
    return ns / NS_PER_S


def ceil_bytes(demand_bytes: float) -> int:
    return math.ceil(demand_bytes)


def floor_bytes(capacity_bytes: float) -> int:
    return math.floor(capacity_bytes)


def lowered_ns(objective_ns: int, tolerance: float) -> int:
    """The least whole value whose distance to the objective is within `tolerance` of it, at least 1."""
    return max(1, math.ceil(objective_ns * (1 - tolerance)))


def raised_ns(bound_ns: int, tolerance: float) -> int:
    """The largest whole objective whose distance to the bound is within `tolerance` of it."""
    return math.floor(bound_ns / (1 - tolerance)) if tolerance < 1 else bound_ns


def floor_weight(weight: int, most: int, total: int) -> int:
    """Of weights with that total when the total shall be `most`; at least 1."""
    return max(1, weight * most // total)


def scaled_ns(duration_ns: int, factor: float) -> int:
    return math.ceil(duration_ns * factor)


def scaled_bytes(size_bytes: int, factor: float) -> int:
    return math.ceil(size_bytes * factor)


def floor_ns_of_bound(solver_bound: float) -> int:
    """The last whole value that is surely proven: a solver reports its integer bound as a float, a hair off."""
    return math.floor(solver_bound * (1 - 1e-12))


def floor_percent(fraction: float) -> int:
    """Whole percent that are not more."""
    return math.floor(100 * fraction)


def above_ns(durations_ns: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Whole nanoseconds that are surely not less than sums of many doubles."""
    return np.ceil(durations_ns * (1 + 1e-9)).astype(np.int64) + 1
