"""DeepSpeed's JSON, read back by a few lines of our own: batch, ZeRO stage and sizes are the plan's."""

import json
import re
from typing import Any

import pytest
from random_plans import random_plan

from mmplan.errors import CheckError
from mmplan.planner.formats.deepspeed import export_deepspeed
from mmplan.scenario.technique import SHARDINGS


def document(made: Any) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(made.files["ds_config.json"])
    return read


def test_random_plans_come_back_with_batch_stage_and_sizes(request: pytest.FixtureRequest) -> None:
    exported = 0
    for seed in range(request.config.getoption("--round-trips") // 2):
        plan = random_plan(seed)
        try:
            made = export_deepspeed(plan)
        except CheckError:
            continue
        exported += 1
        read = document(made)
        batch = read["train_micro_batch_size_per_gpu"] * read["gradient_accumulation_steps"] * plan.dp
        assert batch == read["train_batch_size"] == plan.scenario.global_batch
        assert read["gradient_accumulation_steps"] == plan.microbatches
        stage = SHARDINGS.index(plan.sharding)
        assert read["zero_optimization"]["stage"] == (min(stage, 1) if plan.pp > 1 else stage)
        assert read.get("sequence_parallel_size", 1) == plan.cp
        assert read.get("expert_parallel", {}).get("autoep_size", 1) == plan.ep
        if plan.pp == 1:
            assert read.get("tensor_parallel", {}).get("autotp_size", 1) == plan.tp
        else:
            (told,) = (note for note in made.notes if "PipelineModule" in note)
            axes = {name: int(value) for name, value in re.findall(r"num_(\w+)=(\d+)", told)}
            assert axes == {"pp": plan.pp, "mp": plan.tp, "dp": plan.dp}
    assert exported


def test_shards_of_parameters_under_a_pipeline_are_a_priced_loss() -> None:
    plan = next(p for p in map(random_plan, range(200)) if p.pp > 1 and p.cp == 1 and p.sharding == "parameters")
    told = [loss for loss in export_deepspeed(plan).losses if "its parameters" in loss.sentence]
    assert len(told) == 1 and told[0].step_s is not None


def test_tensor_and_sequence_parallelism_together_are_refused_with_both_degrees() -> None:
    plan = next(p for p in map(random_plan, range(200)) if p.tp > 1 and p.cp > 1)
    with pytest.raises(CheckError, match=f"tp={plan.tp} and cp={plan.cp}"):
        export_deepspeed(plan)
