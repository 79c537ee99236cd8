"""Whole runs with sharded state and recomputed blocks: AdamW trains as without, and validation is green."""

from dataclasses import replace

import pytest
from tiny_plans import TWO_STAGES, hand_plan, tiny_scenario

from mmplan.cost_models.layout import RecomputeLevel
from mmplan.planner.plan import Plan
from mmplan.runtime.launch import execute
from mmplan.runtime.measurement import Measurement
from mmplan.runtime.validate import validate
from mmplan.scenario.technique import Sharding

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("at_hand")]


def plan_with(sharding: Sharding, recompute: RecomputeLevel) -> Plan:
    plan = hand_plan(replace(tiny_scenario(), global_batch=8), TWO_STAGES, dp=2)
    stages = tuple(replace(stage, recompute=recompute) for stage in plan.stages)
    return replace(plan, sharding=sharding, stages=stages)


@pytest.fixture(scope="module")
def plain() -> Measurement:
    run = execute(plan_with("none", "none"), steps=2, local=4)  # the first is never the recorded one
    assert run is not None
    return run


@pytest.mark.parametrize(
    ("sharding", "recompute"), [("optimizer", "none"), ("gradients", "half"), ("parameters", "full")]
)
def test_sharded_training_follows_plain_training_with_the_predicted_bytes_and_memory(
    sharding: Sharding, recompute: RecomputeLevel, plain: Measurement
) -> None:
    plan = plan_with(sharding, recompute)
    run = execute(plan, steps=2, local=4)
    assert run is not None
    for step, expected in zip(run.steps, plain.steps, strict=True):
        assert step.losses["llm"] == pytest.approx(expected.losses["llm"], rel=1e-5)
    for rank, whole in zip(run.ranks, plain.ranks, strict=True):
        assert rank.peak_memory_bytes < whole.peak_memory_bytes
        assert rank.reduce_bytes > whole.reduce_bytes > 0
    rows = [row for row in validate(plan, run).rows if row.threshold is not None]
    assert {"sent_bytes", "reduce_bytes", "peak_memory_bytes"} <= {row.quantity for row in rows}
    assert all(row.passed for row in rows)


def test_a_rehearsal_of_a_sharded_plan_moves_the_bytes_of_the_plan() -> None:
    plan = plan_with("parameters", "full")
    run = execute(plan, steps=1, local=4, rehearse=True, unit_s=0.01)
    assert run is not None
    checked = [row for row in validate(plan, run).rows if row.quantity in ("sent_bytes", "reduce_bytes")]
    assert checked and all(row.passed and row.measured > 0 for row in checked if row.quantity == "reduce_bytes")
