"""Whole runs of plans that compress gradients: the bytes of the plan, and training that goes on."""

from dataclasses import replace

import pytest
from tiny_plans import TWO_STAGES, hand_plan, tiny_scenario

from mmplan.cost_models.build import build_graph
from mmplan.planner.plan import Plan
from mmplan.runtime.launch import execute
from mmplan.runtime.measurement import Measurement
from mmplan.runtime.validate import validate
from mmplan.scenario.asked import Zone
from mmplan.scenario.technique import Compression

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("at_hand")]
STEPS = 4


def run_of(compression: Compression, *, whole: bool = False) -> tuple[Plan, Measurement]:
    scenario = replace(tiny_scenario(), global_batch=8)
    layers = tuple(layer.id for layer in build_graph(scenario).layers())
    zones = (Zone(name="all", layers=layers, forbid=("split", "compression")),) if whole else ()
    constraints = replace(scenario.constraints, zones=zones)
    technique = replace(scenario.technique, compression=compression)
    plan = hand_plan(replace(scenario, constraints=constraints, technique=technique), TWO_STAGES, dp=2)
    run = execute(plan, steps=STEPS, local=4)
    assert run is not None
    return plan, run


@pytest.fixture(scope="module")
def plain() -> Measurement:
    return run_of("none")[1]


def test_a_compressed_run_sends_the_bytes_of_its_plan_and_learns(plain: Measurement) -> None:
    plan, run = run_of("topk")
    rows = [row for row in validate(plan, run).rows if row.threshold is not None]
    assert {"reduce_bytes", "peak_memory_bytes"} <= {row.quantity for row in rows}
    assert all(row.passed for row in rows)
    for rank, whole in zip(run.ranks, plain.ranks, strict=True):
        assert 0 < rank.reduce_bytes < whole.reduce_bytes / 10
    losses, expected = ([step.losses["llm"] for step in one.steps] for one in (run, plain))
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)  # weights are alike before the first update
    assert losses[-1] < losses[0] - 0.1 * (expected[0] - expected[-1])


def test_where_all_layers_are_in_a_zone_nothing_is_compressed(plain: Measurement) -> None:
    plan, run = run_of("topk", whole=True)
    assert all(row.passed for row in validate(plan, run).rows if row.quantity == "reduce_bytes")
    assert [rank.reduce_bytes for rank in run.ranks] == [rank.reduce_bytes for rank in plain.ranks]
    for step, expected in zip(run.steps, plain.steps, strict=True):
        assert step.losses["llm"] == pytest.approx(expected.losses["llm"], rel=1e-6)
