"""Configurations for torchtitan: what is refused, and names of parts."""

import tomllib
from collections.abc import Iterator
from dataclasses import replace

import pytest
from random_plans import random_plan
from read_back import python_constants

from mmplan.errors import CheckError
from mmplan.planner.formats.linearised import repriced
from mmplan.planner.formats.torchtitan import export_torchtitan
from mmplan.planner.formats.torchtitan_toml import export_torchtitan_toml
from mmplan.planner.plan import Plan


def test_frozen_modules_are_refused_by_name() -> None:
    plans = (random_plan(seed, ("llava-1.5-7b-sft",)) for seed in range(40))
    plan = next(p for p in plans if p.scenario.model.module("vision").training.mode == "frozen")
    with pytest.raises(CheckError, match="vision frozen"):
        export_torchtitan(plan)


def test_the_encoder_stands_in_the_first_part_and_the_last_norm_beside_the_last_block() -> None:
    plans = (random_plan(seed, ("qwen2.5-vl-7b-sft",)) for seed in range(100))
    plan = next(p for p in plans if p.pp > 2 and p.scenario.model.module("vision").training.mode == "full")
    parts = python_constants(export_torchtitan(plan).files["torchtitan_plan.py"])["PARALLELISM"][
        "module_fqns_per_model_part"
    ]
    assert parts[0][:2] == ["vision_encoder", "tok_embeddings"]
    (with_norm,) = (part for part in parts if "norm" in part)
    blocks = sum(name.startswith("layers.") for part in parts for name in part)
    assert f"layers.{blocks - 1}" in with_norm


def exportable(seeds: range, **wanted: int | str) -> Iterator[Plan]:
    """Trainable plans with these degrees."""
    for seed in seeds:
        plan = random_plan(seed, ("qwen2.5-vl-7b-sft", "pixtral-12b", "internvl2.5-26b"))
        full = all(module.training.mode == "full" for module in plan.scenario.model.modules)
        if full and all(getattr(plan, name) == value for name, value in wanted.items()):
            yield plan


def training_of(text: str) -> dict[str, object]:
    return dict(tomllib.loads(text)["training"])


def test_the_precision_is_written_and_gradients_are_summed_in_fp32() -> None:
    plan = next(plan for plan in exportable(range(100)) if plan.scenario.precision == "bf16" and plan.dp > 1)
    made = export_torchtitan_toml(plan)
    assert training_of(made.files["plan.toml"])["mixed_precision_param"] == "bfloat16"
    assert '"mixed_precision_param": "bfloat16"' in export_torchtitan(plan).files["torchtitan_plan.py"]
    fp16 = replace(plan.scenario, optimizer=replace(plan.scenario.optimizer, gradient_dtype="bf16"))
    summed = export_torchtitan_toml(repriced(plan, scenario=fp16))
    assert any("sums gradients in fp32, the plan in bf16" in loss.sentence for loss in summed.losses)
    single = replace(plan.scenario, precision="fp32")
    text = export_torchtitan_toml(repriced(plan, scenario=single)).files["plan.toml"]
    assert training_of(text)["mixed_precision_param"] == "float32"


def test_release_0_2_has_no_bf16_and_no_replicas_beside_tp_or_a_pipeline_without_fsdp() -> None:
    """Its DDP stands alone (models/llama3/infra/parallelize.py), its casts are FSDP's (distributed/utils.py)."""
    alone = next(plan for plan in exportable(range(200), dp=1, cp=1) if plan.tp * plan.pp > 1)
    with pytest.raises(CheckError, match="only where FSDP shards; the plan has dp=1"):
        export_torchtitan_toml(alone)
    replicas = next(plan for plan in exportable(range(100), cp=1) if plan.dp > 1 and plan.tp * plan.pp > 1)
    beside = repriced(replicas, sharding="none")
    parallelism = tomllib.loads(export_torchtitan_toml(beside).files["plan.toml"])["parallelism"]
    assert parallelism["data_parallel_shard_degree"] == beside.dp
