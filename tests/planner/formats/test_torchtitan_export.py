"""Configurations for torchtitan: what is refused, and names of parts."""

import pytest
from random_plans import random_plan
from read_back import python_constants

from mmplan.errors import CheckError
from mmplan.planner.formats.torchtitan import export_torchtitan


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
