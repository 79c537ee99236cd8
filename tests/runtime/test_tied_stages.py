"""Whole runs of plans whose head reads a token table of another stage: bytes as predicted, one copy in checkpoints, and
training as if there were one."""

from dataclasses import replace
from pathlib import Path

import pytest
from gradient_runs import CPU, table_name
from tiny_plans import TWO_STAGES, hand_plan, tiny_scenario

from mmplan.cost_models.build import build_graph
from mmplan.planner.plan import Plan
from mmplan.runtime.checkpoint.options import Checkpoints
from mmplan.runtime.launch import execute
from mmplan.runtime.measurement import Measurement
from mmplan.runtime.train import build_stages
from mmplan.runtime.validate import validate
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.technique import Sharding

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("at_hand")]
STEPS, BEHIND = 4, 2
ONE_STAGE = (tuple(layer for stage in TWO_STAGES for layer in stage),)


def tied_scenario() -> Scenario:
    scenario = replace(tiny_scenario(), global_batch=8)
    modules = tuple(
        module if module.vocabulary is None else replace(module, vocabulary=replace(module.vocabulary, tied=True))
        for module in scenario.model.modules
    )
    return replace(scenario, model=replace(scenario.model, modules=modules))


def over_stages(sharding: Sharding) -> Plan:
    return replace(hand_plan(tied_scenario(), TWO_STAGES, dp=2), sharding=sharding)


@pytest.fixture(scope="module")
def alone() -> Measurement:
    run = execute(hand_plan(tied_scenario(), ONE_STAGE), steps=STEPS, local=1)
    assert run is not None
    return run


def test_sharded_copies_train_as_one_table_and_a_checkpoint_has_it_once(alone: Measurement, tmp_path: Path) -> None:
    """Half of the steps on two stages with ZeRO-3, the rest on one."""
    plan = over_stages("parameters")
    run = execute(plan, steps=BEHIND, local=4, checkpoints=Checkpoints(folder=tmp_path))
    assert run is not None
    rows = [row for row in validate(plan, run).rows if row.threshold is not None]
    assert {"sent_bytes", "reduce_bytes", "peak_memory_bytes"} <= {row.quantity for row in rows}
    assert all(row.passed for row in rows)
    going_on = Checkpoints(resume=tmp_path, required=True)
    same = execute(hand_plan(tied_scenario(), ONE_STAGE), steps=STEPS, local=1, checkpoints=going_on)
    assert same is not None and same.resumed is not None
    for step, other in zip(same.steps, alone.steps, strict=True):
        assert step.losses["llm"] == pytest.approx(other.losses["llm"], rel=1e-5)


def test_a_rehearsal_sums_over_stages_too() -> None:
    plan = over_stages("optimizer")
    run = execute(plan, steps=1, local=4, rehearse=True, unit_s=0.01)
    assert run is not None
    assert any(item.action.kind == "TIE" for item in run.timeline)
    assert all(row.passed for row in validate(plan, run).rows if row.quantity == "reduce_bytes")


def test_copies_begin_as_the_table_and_have_its_place() -> None:
    plan = over_stages("none")
    stages = [build_stages(plan, build_graph(plan.scenario), row, CPU)[row] for row in range(2)]
    (table,), (head,) = (
        [
            (parameter, stage.places[parameter])
            for name, parameter in stage.model.named_parameters()
            if table_name(stage.model, name) == "layers.llm_embed.parts.table.weight"
        ]
        for stage in stages
    )
    assert table[0].equal(head[0]) and (table[1].name, table[1].shape) == (head[1].name, head[1].shape)
    assert (table[1].writes, head[1].writes, head[1].repeated) == (None, False, True)
