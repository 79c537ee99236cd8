"""Orders and meshes for torch, read back by a few lines of our own."""

import json
import math
from typing import Any

import pytest
from random_plans import random_plan

from mmplan.errors import CheckError
from mmplan.planner.formats.torch_pipelining import export_torch_pipelining
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.text import parse_schedule_csv
from mmplan.scenario.layer_ids import expand_ids


def rank_at(document: dict[str, Any], *place: int) -> int:
    """Row-major, as `init_device_mesh` numbers a world."""
    rank = 0
    for size, index in zip(document["mesh_shape"], place, strict=True):
        rank = rank * size + index
    return rank


def test_random_plans_come_back_with_ranks_layers_and_all_actions(request: pytest.FixtureRequest) -> None:
    exported = 0
    for seed in range(request.config.getoption("--round-trips")):
        plan = random_plan(seed)
        try:
            made = export_torch_pipelining(plan)
        except CheckError:
            continue
        exported += 1
        document = json.loads(made.files["device_mesh.json"])
        assert math.prod(document["mesh_shape"]) == document["world_size"] == plan.rank_count
        orders = parse_schedule_csv(made.files["orders.csv"])
        stages = document["stages"]
        if len(stages) == len(plan.stages):
            for index, stage in enumerate(stages):
                first, last = stage["ranks"]
                assert tuple(range(first, last + 1)) == plan.stage_ranks(index)
                assert tuple(expand_ids(stage["layers"])) == plan.stages[index].layers
                assert rank_at(document, stage["pp"], plan.dp - 1, plan.cp - 1, plan.tp - 1) == last
        forwards = sorted((a.stage, a.microbatch) for order in orders for a in order if a.kind == "F")
        assert forwards == [(s, k) for s in range(len(stages)) for k in range(plan.microbatches)]
        for row, order in enumerate(orders):
            assert {a.stage for a in order} == {s["stage"] for s in stages if s["pp"] == row}
    assert exported


def side_by_side() -> Plan:
    """Two encoders on stages of their own in front of the language model."""

    def apart(plan: Plan) -> bool:
        held = [{layer.partition(".")[0] for layer in stage.layers} for stage in plan.stages]
        return len(held) > 2 and any("vision" in h and "audio" not in h for h in held) and not plan.placement

    return next(plan for plan in (random_plan(seed, ("tiny",)) for seed in range(400)) if apart(plan))


def test_parallel_encoders_are_put_in_a_row_with_the_price() -> None:
    made = export_torch_pipelining(side_by_side())
    told = [loss for loss in made.losses if "runs chains" in loss.sentence]
    assert all(loss.step_s is not None for loss in told)
    first, *_ = parse_schedule_csv(made.files["orders.csv"])
    assert str(first[0]) == "0F0"
