"""Paired comparisons against numbers worked out by hand and tables of Student's t."""

import math

import pytest

from mmplan.runtime.numerics.ab import compare, paired
from mmplan.runtime.student_t import t_quantile


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423)]
)
def test_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(quantile, abs=1e-4)


def test_the_interval_is_students_t_of_the_paired_differences() -> None:
    """Differences -3, -5, -4: mean -4, deviation 1, half width 4.3027 / sqrt(3) = 2.4842."""
    found = paired([(10, 7), (30, 25), (20, 16)])
    assert found.difference == -4
    assert (found.low, found.high) == (pytest.approx(-6.4842, abs=1e-4), pytest.approx(-1.5158, abs=1e-4))
    assert found.verdict == "b needs fewer steps"
    assert paired([(10, 7), (30, 33), (20, 19)]).verdict == "no difference shown"
    assert paired([(7, 10), (25, 30), (16, 20)]).verdict == "b needs more steps"


def test_pairing_finds_what_the_spread_over_seeds_hides() -> None:
    """b saves 5 steps each time, while seeds differ by hundreds."""
    found = compare(lambda seed: 100 * seed + 5, lambda seed: 100 * seed, seeds=range(1, 6))
    assert (found.low, found.difference, found.high) == (-5, -5, -5)


def test_where_a_target_is_missed_the_order_decides() -> None:
    """Six wins of six have a p value of 2 / 64, five one of 2 / 32."""
    found = paired([(10, 7), (30, None), (20, 16)])
    assert found.missed == (0, 1) and found.wins == (1, 2) and found.verdict == "no difference shown"
    assert paired([(None, 7)] * 6).verdict == "b needs fewer steps"
    assert paired([(7, None)] * 6).verdict == "b needs more steps"
    five = paired([(None, 7)] * 5)
    assert five.sign_p == 1 / 16 and five.verdict == "no difference shown"
    nobody = paired([(None, None), (None, 3)])
    assert math.isnan(nobody.difference) and nobody.wins == (0, 1) and nobody.sign_p == 1


def test_a_comparison_needs_seeds() -> None:
    with pytest.raises(ValueError, match=r"at least 2 seeds, each once: \[1\]"):
        compare(lambda seed: 1, lambda seed: 1, seeds=[1])
    with pytest.raises(ValueError, match=r"confidence 95 is not between 0 and 1"):
        paired([(1, 2), (2, 3)], confidence=95)
