"""Arithmetic of intervals against counting moments one by one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.cost_models.traces.intervals import Spans, clipped, common, covered_ns, gaps, union, without

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(-2, 8)), max_size=12)


def spans(pairs: list[tuple[int, int]]) -> Spans:
    starts = np.array([start for start, _ in pairs], np.int64)
    return union(starts, starts + np.array([length for _, length in pairs], np.int64))


def moments(found: Spans) -> set[int]:
    return {
        t for start, end in zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True) for t in range(start, end)
    }


@settings(max_examples=80, deadline=None)
@given(PAIRS, PAIRS, st.integers(0, 40), st.integers(0, 40))
def test_sets_of_time_are_sets_of_moments(
    first: list[tuple[int, int]], second: list[tuple[int, int]], at: int, to: int
) -> None:
    a, b = spans(first), spans(second)
    assert moments(a) == {t for start, length in first for t in range(start, start + length)}
    assert (a.start_ns[1:] > a.end_ns[:-1]).all()
    assert moments(common(a, b)) == moments(a) & moments(b)
    assert moments(without(a, b)) == moments(a) - moments(b)
    assert moments(clipped(a, at, to)) == moments(a) & set(range(at, to))
    assert moments(gaps(a, at, to)) == set(range(at, to)) - moments(a)
    assert covered_ns(a, np.array([at]), np.array([to]))[0] == len(moments(a) & set(range(at, to)))
    assert len(moments(a)) == round(a.seconds * 1e9)
