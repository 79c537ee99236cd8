"""The array clock against closed forms of schedules whose orders are written down here."""

import numpy as np
import pytest
from chains import FORWARD_S, INPUT_S, WEIGHT_S, chain_times, one_f_one_b, zero_bubble

T = FORWARD_S + INPUT_S + WEIGHT_S


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 32)])
def test_gpipe_with_split_backward(p: int, m: int) -> None:
    """(m + p - 1) T + 2 (p - 1) c: a gradient travels on while its stage computes W, so fill and drain miss p - 1 W."""
    order = [[(0, "F", k) for k in range(m)] + [(0, kind, k) for k in range(m) for kind in "IW"]] * p
    lag_s = 0.25
    span_s, _ = chain_times(order, m, lag_s)
    assert span_s == pytest.approx((m + p - 1) * T - (p - 1) * WEIGHT_S + 2 * (p - 1) * lag_s)


@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_interleaving_divides_fill_and_drain_by_the_chunks(p: int, m: int, v: int) -> None:
    """m T + (p - 1) T / v without lags, with F, I, W of a rank's v chunks together T (Narayanan et al., SC 2021)."""
    span_s, _ = chain_times(one_f_one_b(p, m, v, whole=True), m, 0.0, chunks=v)
    assert span_s == pytest.approx(m * T + (p - 1) * T / v, rel=1e-12)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 24), (8, 32)])
def test_lags_of_interleaving_stay_within_a_wrap_around_of_the_published_form(p: int, m: int, v: int) -> None:
    """The zero-bubble paper's rates use m T + (p - 1) T / v + [2 (p - 1) + (2 v - 3) p] c; lags that a rank cannot hide
    add up to one hop per rank, p c."""
    lag_s = 0.002
    span_s, _ = chain_times(one_f_one_b(p, m, v, whole=True), m, lag_s, chunks=v)
    published_s = m * T + (p - 1) * T / v + (2 * (p - 1) + (2 * v - 3) * p) * lag_s
    assert abs(span_s - published_s) <= (p + 1) * lag_s


@pytest.mark.parametrize(("p", "m"), [(4, 12), (8, 24), (8, 32), (16, 48)])
def test_zb_h1(p: int, m: int) -> None:
    """m T + (p - 1)(F + I - W) + 4 (p - 1) c (Qi et al., arXiv 2401.10241, with hops)."""
    lag_s = 0.01
    order = [zero_bubble(m, warm=p - rank, limit=p) for rank in range(p)]
    _, longest_s = chain_times(order, m, lag_s)
    assert longest_s == pytest.approx(m * T + (p - 1) * (FORWARD_S + INPUT_S - WEIGHT_S) + 4 * (p - 1) * lag_s)


@pytest.mark.parametrize(("p", "m"), [(4, 12), (8, 24), (8, 32), (16, 48)])
def test_zb_h2_by_the_longest_span_of_a_stage(p: int, m: int) -> None:
    """m T + (p - 1)(F + I - 2 W) + 2 (p - 1) c: from a stage's first F to its last W, not the makespan."""
    lag_s = 0.01
    order = [zero_bubble(m, warm=2 * (p - rank) - 1, limit=2 * p - 1) for rank in range(p)]
    makespan_s, longest_s = chain_times(order, m, lag_s)
    assert longest_s == pytest.approx(m * T + (p - 1) * (FORWARD_S + INPUT_S - 2 * WEIGHT_S) + 2 * (p - 1) * lag_s)
    assert makespan_s >= longest_s


def test_makespan_is_affine_in_microbatches_with_step_p() -> None:
    """What m = 2 p and 3 p take gives m = 8 p exactly."""
    for p, v in ((4, 1), (8, 2)):
        spans_s = [chain_times(one_f_one_b(p, k * p, v, whole=True), k * p, 0.125, chunks=v)[0] for k in (2, 3, 8)]
        assert spans_s[2] == pytest.approx(spans_s[1] + 5 * (spans_s[1] - spans_s[0]), rel=1e-12)
        assert np.isfinite(spans_s).all()
