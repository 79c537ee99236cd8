"""Plans as Accelerate's configuration: its degrees make up its processes, what it lacks is refused or priced."""

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml
from export_readers import same_by_accelerate
from random_plans import random_plan
from shaped_plans import flat_plan

from mmplan.errors import CheckError
from mmplan.planner.formats.accelerate import export_accelerate
from mmplan.planner.formats.linearised import mean_step_s, repriced
from mmplan.planner.plan import Plan

SEEDS = range(24)


def read(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    files = export_accelerate(plan).files
    return yaml.safe_load(files["accelerate.yaml"]), json.loads(files["training.json"])


def product(values: dict[str, Any]) -> int:
    degrees = values["parallelism_config"]
    sizes = [degrees[f"parallelism_config_{name}_size"] for name in ("dp_replicate", "dp_shard", "tp", "cp")]
    return int(sizes[0] * sizes[1] * sizes[2] * sizes[3])


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_written_has_the_plans_degrees(seed: int) -> None:
    plan = flat_plan(seed)
    values, _ = read(plan)
    assert same_by_accelerate(plan, export_accelerate(plan))
    if plan.width > 1:
        assert product(values) == plan.rank_count


@pytest.mark.parametrize(
    ("sharding", "kind", "reshard"),
    [("none", "MULTI_GPU", None), ("gradients", "FSDP", False), ("parameters", "FSDP", True)],
)
def test_each_zero_stage_that_fsdp_has_is_as_it_is(sharding: str, kind: str, reshard: bool | None) -> None:
    plan = flat_plan(0, tp=1, dp=2, level="none", sharding=sharding)
    values, _ = read(plan)
    assert values["distributed_type"] == kind
    assert values.get("fsdp_config", {}).get("fsdp_reshard_after_forward") == reshard
    assert export_accelerate(plan).losses == ()


def test_zero_1_shards_gradients_too_at_a_price() -> None:
    plan = flat_plan(0, tp=1, dp=2, level="none", sharding="optimizer")
    (loss,) = export_accelerate(plan).losses
    assert "shards gradients" in loss.sentence
    assert loss.step_s == pytest.approx(mean_step_s(repriced(plan, sharding="gradients")) - mean_step_s(plan))


def test_replicas_that_shard_nothing_beside_tp_are_sharded() -> None:
    plan = flat_plan(0, tp=2, dp=2, level="none", sharding="none")
    values, _ = read(plan)
    assert values["distributed_type"] == "FSDP"
    assert [loss for loss in export_accelerate(plan).losses if "no replicas without FSDP2" in loss.sentence]


def test_partly_recomputed_blocks_are_all_recomputed_at_a_price() -> None:
    plan = flat_plan(0, tp=1, dp=2, level="none", sharding="parameters")
    half = repriced(plan, levels=["half"])
    (loss,) = export_accelerate(half).losses
    assert loss.step_s is not None
    assert loss.step_s > 0
    assert read(half)[0]["fsdp_config"]["fsdp_activation_checkpointing"] is True


def test_tensor_parallelism_alone_is_no_fsdp() -> None:
    """Accelerate refuses FSDP2 that has nothing to shard over."""
    values, _ = read(flat_plan(0, tp=2, dp=1, level="none", sharding="none"))
    assert values["distributed_type"] == "MULTI_GPU"
    assert "fsdp_config" not in values


def test_pipelines_and_experts_are_refused_by_name() -> None:
    refused = {}
    for seed in SEEDS:
        plan = random_plan(seed)
        try:
            export_accelerate(plan)
        except CheckError as error:
            refused[seed] = str(error)
            assert "pipeline stages (pp=" in str(error) or "expert parallelism (ep=" in str(error)
        else:
            assert (plan.pp, plan.ep) == (1, 1)
    assert len(refused) > 12


def test_an_unsound_plan_is_refused() -> None:
    plan = flat_plan(0, tp=1)
    with pytest.raises(CheckError, match="not sound"):
        export_accelerate(replace(plan, microbatches=plan.microbatches + 1))
