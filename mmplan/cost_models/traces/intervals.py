"""Sets of time as sorted, disjoint intervals of integer nanoseconds: unions, what is inside both, what is left over.

Work on several streams overlaps; a union counts each moment once.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmplan.units import seconds_of_nanoseconds

Ints = npt.NDArray[np.int64]  # or narrower, where a column holds indices
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Disjoint, ascending [start, end) with end > start."""

    start_ns: Ints
    end_ns: Ints

    @property
    def seconds(self) -> float:
        return seconds_of_nanoseconds(int((self.end_ns - self.start_ns).sum()))

    def __len__(self) -> int:
        return len(self.start_ns)


def empty() -> Spans:
    return Spans(start_ns=np.zeros(0, np.int64), end_ns=np.zeros(0, np.int64))


def union(start_ns: Ints, end_ns: Ints) -> Spans:
    """Of intervals in any order that may overlap; empty ones vanish."""
    some = end_ns > start_ns
    start_ns, end_ns = start_ns[some], end_ns[some]
    if len(start_ns) == 0:
        return empty()
    order = np.argsort(start_ns, kind="stable")
    start_ns, reach_ns = start_ns[order], np.maximum.accumulate(end_ns[order])
    first = np.concatenate(([True], start_ns[1:] > reach_ns[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Spans(start_ns=start_ns[first], end_ns=reach_ns[last])


def clipped(spans: Spans, begin_ns: int, end_ns: int) -> Spans:
    """The part of `spans` inside [begin, end)."""
    return union(np.maximum(spans.start_ns, begin_ns), np.minimum(spans.end_ns, end_ns))


def common(a: Spans, b: Spans) -> Spans:
    """Moments in both."""
    return _pieces(a, b, both=True)


def without(a: Spans, b: Spans) -> Spans:
    """Moments in `a` that are not in `b`."""
    return _pieces(a, b, both=False)


def gaps(spans: Spans, begin_ns: int, end_ns: int) -> Spans:
    """Moments of [begin, end) that are in no span."""
    return without(union(np.array([begin_ns]), np.array([end_ns])), spans)


def covered_ns(spans: Spans, begin_ns: Ints, end_ns: Ints) -> Ints:
    """How much of each window [begin, end) lies in `spans`."""
    covered: Ints = np.maximum(_covered_until(spans, end_ns) - _covered_until(spans, begin_ns), 0)
    return covered


def holds(spans: Spans, at_ns: Ints) -> Flags:
    """Whether each moment lies in a span."""
    if len(spans) == 0:
        return np.zeros(len(at_ns), bool)
    index = np.searchsorted(spans.start_ns, at_ns, side="right") - 1
    found: Flags = (index >= 0) & (at_ns < spans.end_ns[np.maximum(index, 0)])
    return found


def _covered_until(spans: Spans, at_ns: Ints) -> Ints:
    if len(spans) == 0:
        return np.zeros(len(at_ns), np.int64)
    before = np.concatenate(([0], np.cumsum(spans.end_ns - spans.start_ns)))
    index = np.searchsorted(spans.start_ns, at_ns, side="right") - 1
    inside = np.clip(at_ns - spans.start_ns[np.maximum(index, 0)], 0, None)
    lengths = (spans.end_ns - spans.start_ns)[np.maximum(index, 0)]
    sums: Ints = np.where(index < 0, 0, before[np.maximum(index, 0)] + np.minimum(inside, lengths))
    return sums


def _pieces(a: Spans, b: Spans, *, both: bool) -> Spans:
    """Every boundary of either cuts time; pieces inside `a` stay by whether they are inside `b`."""
    cuts = np.unique(np.concatenate((a.start_ns, a.end_ns, b.start_ns, b.end_ns)))
    if len(cuts) < 2:
        return empty()
    begin_ns, end_ns = cuts[:-1], cuts[1:]
    keep = holds(a, begin_ns) & (holds(b, begin_ns) == both)
    return union(begin_ns[keep], end_ns[keep])
