"""torchtitan's own configuration, meshes and splits read what is exported, without its data sets and kernels."""

import sys
import types
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from random_plans import random_plan

from mmplan.errors import CheckError
from mmplan.planner.formats.torchtitan import export_torchtitan
from mmplan.planner.formats.torchtitan_job import TitanJob, titan_job
from mmplan.planner.plan import Plan

pytestmark = pytest.mark.interop
TRAINED = ("kimi-k2.5-1t", "pixtral-12b", "qwen2.5-vl-7b-sft", "qwen3-vl-30b-a3b", "internvl2.5-26b")


def exportable(count: int) -> Iterator[tuple[Plan, TitanJob, str]]:
    for seed in range(count):
        plan = random_plan(seed, TRAINED)
        try:
            yield plan, titan_job(plan, "torchtitan"), export_torchtitan(plan).files["torchtitan_plan.py"]
        except CheckError:
            continue


def configured(text: str, layers: int, folder: Path, *, encoder: bool = True) -> Any:
    """What the exported function gives on a model with so many layers."""
    from torchtitan.config import ParallelismConfig, TrainingConfig

    base = types.ModuleType("titan_base")
    model = types.SimpleNamespace(layers=[None] * layers, vision_encoder=object() if encoder else None)
    base.model = lambda: types.SimpleNamespace(  # type: ignore[attr-defined]
        parallelism=ParallelismConfig(),
        training=TrainingConfig(),
        model_spec=types.SimpleNamespace(model=model),
        activation_checkpoint=None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "titan_base", base)
        patch.setenv("TORCHTITAN_BASE", "titan_base:model")
        namespace: dict[str, Any] = {"__file__": str(folder / "torchtitan_plan.py")}
        exec(text, namespace)
        config = namespace["plan"]()
    ParallelismConfig(**asdict(config.parallelism))  # its own checks again, on what was set
    return config


def layers_of(job: TitanJob) -> int:
    assert job.module.transformer is not None
    return job.module.transformer.layers


def meshes(parallelism: Any, world: int) -> Any:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.distributed import ParallelDims

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=world - 1, world_size=world, store=FakeStore())
    dims = ParallelDims.from_config(parallelism, world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchtitan.distributed.parallel_dims.device_type", "cpu")
        dims.build_mesh()
    return dims


def test_titan_finds_the_plans_ranks_parts_and_stages(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    from torchtitan.distributed.pipeline_parallel import _get_pp_rank_to_stage_indices_mapping

    cases = list(exportable(request.config.getoption("--round-trips")))
    assert len(cases) >= 5
    for plan, job, text in cases:
        config = configured(text, layers_of(job), tmp_path)
        dims = meshes(config.parallelism, plan.rank_count)
        last = plan.rank_count - 1
        groups = {"tp": list(range(last - plan.tp + 1, last + 1))}
        groups["pp"] = [row * plan.dp * plan.width + plan.dp * plan.width - 1 for row in range(plan.pp)]
        for name, wanted in groups.items():
            if len(wanted) > 1:
                assert dims.get_mesh(name).mesh.tolist() == wanted, name
        parts = config.parallelism.module_fqns_per_model_part
        if parts is not None:
            schedule = config.parallelism.pipeline_parallel_schedule
            for row in range(plan.pp):
                found = _get_pp_rank_to_stage_indices_mapping(row, plan.pp, schedule, len(parts))
                assert found == job.plan.stages_of(row)
            assert_split(parts, layers_of(job))


def assert_split(parts: list[list[str]], layers: int) -> None:
    """torchtitan's split of a model with these names keeps every module in one part."""
    from torch import nn
    from torchtitan.distributed.pipeline_parallel import _split_module

    model = nn.Module()
    for name in ("vision_encoder", "tok_embeddings", "norm", "lm_head"):
        setattr(model, name, nn.Identity())
    model.layers = nn.ModuleDict({str(index): nn.Identity() for index in range(layers)})
    kept = [
        name for part in parts for name, _ in _split_module(model, part).named_modules() if name not in ("", "layers")
    ]
    assert sorted(kept) == sorted(name for name, _ in model.named_modules() if name not in ("", "layers"))


def pipelined(count: int) -> tuple[Plan, TitanJob, str]:
    return next(case for case in exportable(count) if case[0].pp > 1 and case[0].dp > 1)


def test_a_part_that_lacks_a_layer_is_refused_by_the_file_itself(tmp_path: Path) -> None:
    _, job, text = pipelined(40)
    wrong = text.replace('"layers.1"', '"layers.0"')
    with pytest.raises(ValueError, match=r"layers\.1"):
        configured(wrong, layers_of(job), tmp_path)


def test_another_model_is_refused_by_the_file_itself(tmp_path: Path) -> None:
    _, job, text = pipelined(40)
    with pytest.raises(ValueError, match="layers"):
        configured(text, layers_of(job) + 1, tmp_path)


def test_degrees_that_miss_the_world_are_refused_by_titan(tmp_path: Path) -> None:
    plan, job, text = pipelined(40)
    wrong = text.replace(f'"tensor_parallel_degree": {plan.tp}', f'"tensor_parallel_degree": {plan.tp * 2}')
    with pytest.raises(AssertionError, match="WORLD_SIZE"):
        meshes(configured(wrong, layers_of(job), tmp_path).parallelism, plan.rank_count)


def test_a_field_that_titan_does_not_know_is_refused(tmp_path: Path) -> None:
    _, job, text = pipelined(40)
    with pytest.raises(AttributeError):
        configured(text.replace("tensor_parallel_degree", "tensor_degree"), layers_of(job), tmp_path)
