"""Configurations for torchtitan, read back by a few lines of our own: degrees, parts and orders are the plan's."""

import ast
import math
import tomllib
from typing import Any

import pytest
from random_plans import random_plan

from mmplan.errors import CheckError
from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.torchtitan import export_torchtitan
from mmplan.planner.formats.torchtitan_job import TitanJob, titan_job
from mmplan.planner.formats.torchtitan_toml import export_torchtitan_toml
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.text import parse_schedule_csv, schedule_text

TRAINED = ("kimi-k2.5-1t", "pixtral-12b", "qwen2.5-vl-7b-sft", "qwen3-vl-30b-a3b")


def constants(made: Exported) -> dict[str, Any]:
    """Assignments of the Python file."""
    tree = ast.parse(made.files["torchtitan_plan.py"])
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def jobs(count: int, target: str) -> list[tuple[Plan, TitanJob]]:
    found = []
    for seed in range(count):
        plan = random_plan(seed, TRAINED)
        try:
            found.append((plan, titan_job(plan, target, before_0_3=target != "torchtitan")))
        except CheckError:
            continue
    return found


def assert_is_the_plan(plan: Plan, job: TitanJob, parallelism: dict[str, Any], training: dict[str, Any]) -> None:
    names = (
        "data_parallel_replicate",
        "data_parallel_shard",
        "context_parallel",
        "tensor_parallel",
        "pipeline_parallel",
    )
    degrees = [parallelism[f"{name}_degree"] for name in names]
    assert math.prod(degrees) == plan.rank_count and min(degrees) >= 1
    assert degrees[0] * degrees[1] == plan.dp and degrees[2:4] == [plan.cp, plan.tp]
    assert plan.tp * plan.cp * degrees[1] % parallelism["expert_parallel_degree"] == 0
    rounds = training["global_batch_size"] // (training["local_batch_size"] * plan.dp)
    assert rounds * training["local_batch_size"] == plan.microbatch_size * plan.microbatches
    parts = parallelism.get("module_fqns_per_model_part")
    if parts is not None:
        named = [name for part in parts for name in part]
        assert len(named) == len(set(named))
        blocks = [name for name in named if name.startswith("layers.")]
        assert blocks == [f"layers.{index}" for index in range(len(blocks))]
        assert [sum(name.startswith("layers.") for name in part) for part in parts] == [
            len(part.blocks) for part in job.parts
        ]
    if job.csv:
        assert schedule_text(parse_schedule_csv(job.csv)).split("\n") == list(job.plan.orders)


def test_random_plans_come_back_from_the_python_file(request: pytest.FixtureRequest) -> None:
    cases = jobs(request.config.getoption("--round-trips") // 2, "torchtitan")
    assert cases
    for plan, job in cases:
        read = constants(export_torchtitan(plan))
        assert read["WORLD_SIZE"] == plan.rank_count
        assert_is_the_plan(plan, job, read["PARALLELISM"], read["TRAINING"])


def test_random_plans_come_back_from_toml(request: pytest.FixtureRequest) -> None:
    cases = jobs(request.config.getoption("--round-trips") // 2, "torchtitan before 0.3")
    assert cases
    for plan, job in cases:
        made = export_torchtitan_toml(plan)
        read = tomllib.loads(made.files["plan.toml"])
        assert_is_the_plan(plan, job, read["parallelism"], read["training"])
        assert ("orders.csv" in made.files) == ("pipeline_parallel_schedule_csv" in read["parallelism"])


def test_frozen_modules_are_refused_by_name() -> None:
    plans = (random_plan(seed, ("llava-1.5-7b-sft",)) for seed in range(40))
    plan = next(p for p in plans if p.scenario.model.module("vision").training.mode == "frozen")
    with pytest.raises(CheckError, match="vision frozen"):
        export_torchtitan(plan)
