"""What is odd in a sweep: rates that fall where they should rise, single slow calls, an end that still rises."""

from itertools import pairwise

from mmplan.cost_models.formats.nccl_fit import LARGE_BYTES, LEAST_LARGE_BYTES
from mmplan.cost_models.formats.nccl_sweep import Sweep
from mmplan.scenario.document import counted
from mmplan.units import format_bytes, format_bytes_per_s, format_seconds

_FALL = 0.75  # of the best rate of smaller messages
_BACK = 0.9
_LEVEL = 0.05
_SLOW = 3.0  # times both neighbours
_SAME = 1.15


def shape_of(sweep: Sweep) -> tuple[list[str], list[str]]:
    """Sentences: what the large end shows, and warnings."""
    points = sweep.points
    rates = [sweep.factor * point.size_bytes / point.time_s for point in points]
    sizes = [format_bytes(point.size_bytes) for point in points]
    warnings: list[str] = []
    best = fallen = None
    for index, point in enumerate(points):
        if point.size_bytes < LEAST_LARGE_BYTES:
            continue
        if best is not None and fallen is None and rates[index] < _FALL * rates[best]:
            fallen = index
        elif fallen is not None and best is not None and rates[index] >= _BACK * rates[best]:
            warnings.append(f"busbw dips from {_at(rates, sizes, best)} to {_at(rates, sizes, fallen)}")
            fallen = None
        if best is None or rates[index] > rates[best]:
            best = index
    if fallen is not None and best is not None:
        warnings.append(
            f"busbw collapses from {_at(rates, sizes, best)} to {_at(rates, sizes, fallen)} and stays there: larger "
            "messages are priced with the lower rate"
        )
    warnings += _slow(sweep, sizes)
    return _end(rates, sizes), warnings


def _slow(sweep: Sweep, sizes: list[str]) -> list[str]:
    """Sizes that took longer than their neighbours, or than another call of the same size."""
    points, warnings = sweep.points, []
    slow = [
        index
        for index in range(1, len(points) - 1)
        if points[index].time_s > _SLOW * max(points[index - 1].time_s, points[index + 1].time_s)
    ]
    if slow:
        told = f"{counted(len(slow), 'size')} took over {_SLOW:g} times as long as its neighbours"
        warnings.append(f"{told} ({sizes[slow[0]]}: {format_seconds(points[slow[0]].time_s)})")
    uneven = [index for index, point in enumerate(points) if max(point.samples_s) > _SLOW * min(point.samples_s)]
    if uneven:
        at = points[uneven[0]]
        told = f"calls of {counted(len(uneven), 'size')} differ by over {_SLOW:g} times"
        range_s = f"{format_seconds(min(at.samples_s))} and {format_seconds(max(at.samples_s))}"
        warnings.append(f"{told} ({sizes[uneven[0]]}: {range_s}): the quicker half counts")
    for index, (point, larger) in enumerate(pairwise(points)):
        same = larger.time_s < _SAME * point.time_s and larger.size_bytes > 1.9 * point.size_bytes
        if same and point.size_bytes >= LARGE_BYTES:
            warnings.append(
                f"{sizes[index]} took as long as {sizes[index + 1]}: the smaller may have been a first call"
            )
    return warnings


def _end(rates: list[float], sizes: list[str]) -> list[str]:
    """A plateau, or a rate that still rises."""
    level = next((i for i in range(len(rates)) if all(abs(r / rates[-1] - 1) <= _LEVEL for r in rates[i:])), 0)
    if len(rates) - level >= 3:
        return [f"busbw is level at {format_bytes_per_s(rates[-1])} from {sizes[level]} on"]
    if len(rates) > 1 and rates[-1] > (1 + _LEVEL) * rates[-2]:
        return [f"busbw still rises at {sizes[-1]} ({format_bytes_per_s(rates[-1])}): larger messages may be faster"]
    return []


def _at(rates: list[float], sizes: list[str], index: int) -> str:
    return f"{format_bytes_per_s(rates[index])} at {sizes[index]}"
