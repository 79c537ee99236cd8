"""DeepSpeed's own configuration class reads what is exported, and its pipeline cuts layers as the export says."""

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from random_plans import random_plan

from mmplan.errors import CheckError
from mmplan.planner.formats.deepspeed import _equal_counts, export_deepspeed
from mmplan.planner.plan import Plan
from mmplan.scenario.technique import SHARDINGS

pytestmark = pytest.mark.interop
os.environ["DS_ACCELERATOR"] = "cpu"


def parsed(document: dict[str, Any], replicas: int) -> Any:
    """The class itself; without a communication backend it would take the world for 1, so it is told the replicas."""
    from deepspeed.runtime import config

    class Mpu:
        def get_data_parallel_world_size(self) -> int:
            return replicas

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config.dist, "get_rank", lambda *_, **__: 0)
        return config.DeepSpeedConfig(document, mpu=Mpu())


def exportable(count: int) -> list[tuple[Plan, dict[str, Any]]]:
    found = []
    for seed in range(count):
        try:
            plan = random_plan(seed)
            found.append((plan, json.loads(export_deepspeed(plan).files["ds_config.json"])))
        except CheckError:
            continue
    return found


def test_deepspeed_reads_the_plans_numbers(request: pytest.FixtureRequest) -> None:
    cases = exportable(request.config.getoption("--round-trips"))
    assert len(cases) >= 5
    for plan, document in cases:
        read = parsed(document, plan.dp)
        assert read.train_batch_size == plan.scenario.global_batch
        assert read.gradient_accumulation_steps == plan.microbatches
        stage = SHARDINGS.index(plan.sharding)
        assert read.zero_optimization_stage == (min(stage, 1) if plan.pp > 1 else stage)
        assert read.bfloat16_config.enabled == (plan.scenario.precision == "bf16")
        assert read.expert_parallel_config.autoep_size == plan.ep
        if plan.pp == 1:
            assert max(1, read.tensor_parallel_config.autotp_size) == plan.tp


def test_every_key_at_the_top_is_one_that_deepspeed_reads(request: pytest.FixtureRequest) -> None:
    """Its class ignores unknown ones silently, so they are looked up in its sources."""
    import deepspeed

    folder = Path(str(deepspeed.__file__)).parent
    sources = "".join(path.read_text() for path in (folder / "runtime").rglob("*.py"))
    keys = {key for _, document in exportable(request.config.getoption("--round-trips")) for key in document}
    assert [key for key in sorted(keys) if not re.search(rf"[\"']{key}[\"']", sources)] == []


def test_pipelines_are_cut_as_deepspeed_cuts_them() -> None:
    from deepspeed.runtime.utils import partition_uniform

    plan = next(p for p in map(random_plan, range(100)) if p.pp > 2 and not p.placement and p.scenario.name == "tiny")
    counts = [len(layers) for layers in _equal_counts(plan)]
    counts[-1] -= 1  # the loss is no layer of a PipelineModule
    ends = partition_uniform(sum(counts), plan.pp)
    assert counts == [last - first for first, last in pairwise(ends)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train_batch_size", 7),
        ("zero_optimization", {"stage": 4}),
        ("zero_optimization", {"stage": 1, "overlap_com": True}),
        ("fp16", {"enabled": True}),
    ],
)
def test_a_wrong_export_is_refused_by_deepspeed(key: str, value: object) -> None:
    plan, document = next((p, d) for p, d in exportable(20) if p.dp > 1)
    parsed(document, plan.dp)
    with pytest.raises((AssertionError, ValueError)):
        parsed({**document, key: value}, plan.dp)
