"""Intervals, rank correlation and what a result says of seeds."""

import pytest

from mmplan.runtime.hessian.result import measured, sensitivity_document
from mmplan.runtime.hessian.settings import Settings
from mmplan.runtime.hessian.statistics import mean_interval, overlap, rank_correlation
from mmplan.runtime.hessian.values import Key, Value
from mmplan.runtime.student_t import t_quantile
from mmplan.scenario.scenario import Model, ModelModule, Projector

# Two-sided 95 %, NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.6.7.2.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 20: 2.086, 100: 1.984}


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_are_those_of_the_table(freedom: int) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(TABLE[freedom], abs=5e-4)  # three decimals


def test_an_interval_is_that_of_the_mean() -> None:
    """1, 2, 3: mean 2, deviation 1, error 1 / sqrt(3), times 4.303."""
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 2.4843, 2 + 2.4843), rel=1e-3)
    assert mean_interval([5.0]) == (5.0, None, None)


def test_rank_correlation_sees_order_alone() -> None:
    first = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    assert rank_correlation(first, {"a": 1.0, "b": 10.0, "c": 100.0, "d": 1e6}) == pytest.approx(1.0)
    assert rank_correlation(first, {key: -value for key, value in first.items()}) == pytest.approx(-1.0)
    assert rank_correlation(first, {"a": 2.0, "b": 1.0, "c": 3.0, "d": 4.0}) == pytest.approx(0.8)  # 1 - 6*2/(4*15)
    assert rank_correlation(first, {"a": 1.0, "b": 2.0}) is None
    assert rank_correlation(first, dict.fromkeys(first, 1.0)) is None


def test_overlap_is_what_all_have_of_what_any_has() -> None:
    assert overlap([{"a", "b"}, {"b", "c"}]) == pytest.approx(1 / 3)
    assert overlap([{"a"}]) is None
    assert overlap([set(), set()]) is None


def test_a_result_has_means_zones_and_the_agreement_of_seeds() -> None:
    names = [f"p{i}" for i in range(4)]
    modules = tuple(
        ModelModule(name=name, kind="projector", modality="vision", projector=Projector(dims=(2, 2))) for name in names
    )
    settings = Settings(batches=1, seeds=2, rule="top:1")
    numbers = {
        ("p0.0", 0): 1.0,
        ("p1.0", 0): 2.0,
        ("p2.0", 0): 9.0,
        ("p0.0", 1): 2.0,
        ("p1.0", 1): 9.5,
        ("p2.0", 1): 9.0,
    }
    known = {
        Key(batch, "vision", layer): Value(
            largest=number,
            least=-1.0,
            residual=0.01,
            iterations=5,
            converged=layer != "p0.0",
            loss=2.0,
            trace=None,
            difference=None,
            seconds=0.0,
        )
        for (layer, batch), number in numbers.items()
    }
    sizes = dict.fromkeys([f"{name}.0" for name in names], 6)
    found = measured(known, settings, Model(name="m", modules=modules, edges=()), sizes, frozenset({"p1.0"}), {})
    assert [(one.layer, one.value, one.converged, one.frozen) for one in found.values] == [
        ("p0.0", 1.5, False, False), ("p1.0", 5.75, True, True), ("p2.0", 9.0, True, False),
    ]  # fmt: skip
    assert found.zones == (("p2.0", ("p2.0",)),)
    assert found.missing == ("p3.0",)
    assert found.rank_correlation == pytest.approx({"vision": 0.5})  # ranks 1 2 3 and 1 3 2
    assert found.zone_overlap == 0.0
    document = sensitivity_document(found)
    assert document["layers"] == {"p0.0": {"vision": 1.5}, "p1.0": {"vision": 5.75}, "p2.0": {"vision": 9.0}}
    assert document["details"]["p0.0"]["vision"]["low"] == pytest.approx(1.5 - 12.706 * 0.5, rel=1e-3)
