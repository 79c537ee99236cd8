"""Intervals of step times from the ranges of the numbers they are computed from."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.cost_models.time_rules import Rules, scenario_rules
from mmplan.cost_models.uncertainty import uncertain_numbers, with_number
from mmplan.planner.degrees import Degrees
from mmplan.planner.estimate import StepEstimator
from mmplan.planner.interval import MODEL_ERROR, UNSEEN_MODEL_ERROR, StepInterval, estimate_interval, step_interval
from mmplan.scenario.catalogue import catalogue_device, catalogue_link, device_names, link_names
from mmplan.scenario.load import load_scenario
from mmplan.scenario.origin import Origin
from mmplan.scenario.stacks import parameter_origins, stack_names

SCENARIO = load_scenario(Path(__file__).parents[2] / "scenarios" / "llava-1.5-7b-sft.yaml")
RULES = scenario_rules(SCENARIO)
DEGREES = Degrees(tp=2, pp=2, dp=2, microbatches=8)
ESTIMATOR = StepEstimator(SCENARIO)


def estimated_s(rules: Rules) -> float:
    return ESTIMATOR.with_rules(rules).estimate(DEGREES).step_s


def with_ranges(*origins: Origin) -> Rules:
    links = [replace(link, origins=()) for link in (RULES.node_link, RULES.network_link)]
    device = replace(RULES.device, origins=origins)
    return replace(RULES, device=device, node_link=links[0], network_link=links[1])


def interval_of(*origins: Origin, model_error: float = 0.0) -> StepInterval:
    rules = with_ranges(*origins)
    return step_interval(estimated_s(rules), (rules,), estimated_s, model_error=model_error)


def test_without_ranges_a_step_has_no_interval() -> None:
    interval = interval_of()
    assert interval.p10_s == interval.p90_s == interval.step_s


def test_one_number_moves_the_step_to_what_it_is_at_the_ends_of_its_range() -> None:
    interval = interval_of(Origin(parameter="gemm_fraction", kind="assumed", p10=0.8, p90=1.1))
    gemm = RULES.device.gemm_fraction
    slow, fast = (estimated_s(replace(RULES, device=replace(RULES.device, gemm_fraction=gemm * f))) for f in (0.8, 1.1))
    assert interval.p90_s == pytest.approx(slow)
    assert interval.p10_s == pytest.approx(fast)
    assert [one.number.parameter for one in interval.influences if one.number.owner == "device"] == ["gemm_fraction"]


def test_influences_add_in_squares() -> None:
    first = Origin(parameter="gemm_fraction", kind="fitted", p10=0.9, p90=1.1)
    second = Origin(parameter="memory_fraction", kind="assumed", p10=0.7, p90=1.3)
    logs = [math.log(interval_of(*each).p90_s / estimated_s(RULES)) for each in ((first,), (second,), (first, second))]
    assert logs[2] == pytest.approx(math.hypot(logs[0], logs[1]))
    model = interval_of(first, model_error=0.1)
    assert math.log(model.p90_s / model.step_s) == pytest.approx(math.hypot(logs[0], 0.1))


PARAMETERS = ("gemm_fraction", "memory_fraction", "attention.flash2", "launch_s", "tile_depth", "memory_bytes_per_s")
RANGES = st.lists(st.tuples(st.floats(0.3, 1.0), st.floats(1.0, 3.0)), min_size=6, max_size=6)


@settings(max_examples=15, deadline=None)
@given(narrow=RANGES, wider=st.tuples(st.integers(0, 5), st.floats(0.3, 1.0), st.floats(1.0, 3.0)))
def test_a_wider_range_of_any_number_never_narrows_the_interval(
    narrow: list[tuple[float, float]], wider: tuple[int, float, float]
) -> None:
    index, down, up = wider
    wide = [(a * down, b * up) if i == index else (a, b) for i, (a, b) in enumerate(narrow)]
    small, large = (
        interval_of(
            *(Origin(parameter=p, kind="assumed", p10=a, p90=b) for p, (a, b) in zip(PARAMETERS, ranges, strict=True))
        )
        for ranges in (narrow, wide)
    )
    assert large.p10_s <= small.p10_s * (1 + 1e-12)
    assert large.p90_s >= small.p90_s * (1 - 1e-12)


def test_a_stack_without_measured_rows_has_the_larger_error_of_the_model() -> None:
    def model_error(stack: str) -> float:
        scenario = replace(SCENARIO, technique=replace(SCENARIO.technique, stack=stack))
        form = next(one for one in estimate_interval(scenario, DEGREES).influences if one.number.owner == "model")
        return math.log1p(form.slower)

    assert model_error("nemo-2025") == pytest.approx(MODEL_ERROR)
    assert model_error("mmplan") == pytest.approx(UNSEEN_MODEL_ERROR)


@pytest.mark.parametrize("name", device_names())
def test_every_device_says_where_its_fractions_come_from(name: str) -> None:
    entry = catalogue_device(name)
    kinds = {origin.parameter: origin.kind for origin in entry.device.origins}
    assert {"memory_fraction", "launch_s", "attention.flash2"} <= set(kinds)
    assert set(kinds.values()) <= {"fitted", "assumed"}
    assert "gemm_fraction" in kinds or "fp32_flops_per_s" in kinds  # of a core the product of both was measured
    for link in (entry.node_link, entry.network):
        assert {origin.parameter for origin in catalogue_link(link).origins} >= {"latency_s"}


def test_every_listed_number_exists_and_can_be_moved() -> None:
    for stack in stack_names():
        for name in device_names():
            entry = catalogue_device(name)
            links = catalogue_link(entry.node_link), catalogue_link(entry.network)
            rules = replace(RULES, device=entry.device, node_link=links[0], network_link=links[1])
            rules = replace(rules, technique=replace(rules.technique, stack=stack))
            for number in uncertain_numbers(rules):
                assert number.p10 <= number.value <= number.p90
                assert with_number(rules, number, number.value) is not None
    assert all(link_names())
    assert any(origin.kind == "fitted" for origin in parameter_origins("nemo-2025"))
