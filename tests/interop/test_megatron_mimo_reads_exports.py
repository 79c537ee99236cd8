"""Megatron-Bridge's MIMO configuration accepts the grids that are exported, and its rules see a wrong one."""

import importlib.util
import sys
import types
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from meshed_toys import job, meshed
from random_plans import random_plan

from mmplan.errors import CheckError
from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.megatron_mimo import export_megatron_mimo
from mmplan.planner.plan import Plan

pytestmark = pytest.mark.interop
CONFIG = "megatron.bridge.models.megatron_mimo.megatron_mimo_config"
MODELS = ("kimi-k2.5-1t", "internvl2.5-26b", "llava-1.5-7b-sft", "tiny")


def parallelism(made: Exported, world: int) -> Any:
    """What the exported module gives, finalised by Megatron-Bridge; its package needs CUDA, this file does not."""
    role = types.ModuleType("megatron.core.models.mimo.config.role")
    role.MIMO_LANGUAGE_MODULE_KEY = "language"  # type: ignore[attr-defined]
    path = distribution("megatron-bridge").locate_file(CONFIG.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location(CONFIG, Path(str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("megatron", *(CONFIG.rsplit(".", parts)[0] for parts in (3, 2, 1)), "megatron.core.models.mimo"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, role.__name__, role)
        patch.setitem(sys.modules, CONFIG, module)
        spec.loader.exec_module(module)
        namespace: dict[str, Any] = {}
        exec(made.files["mimo_plan.py"], namespace)
        assert namespace["WORLD_SIZE"] == world
        config = namespace["parallelism"]()
        config.finalize(namespace["WORLD_SIZE"])
    return config


def exportable(count: int) -> list[tuple[Plan, Exported]]:
    found = []
    for seed in range(4 * count):
        try:
            plan = random_plan(seed, MODELS)
            found.append((plan, export_megatron_mimo(plan)))
        except CheckError:
            continue
    return found


def test_grids_of_random_plans_are_accepted_and_cover_the_plans_ranks(request: pytest.FixtureRequest) -> None:
    cases = exportable(request.config.getoption("--round-trips"))
    assert len(cases) >= 5
    for plan, made in cases:
        config = parallelism(made, plan.rank_count)
        language = config.module_parallelisms["language"]
        assert (language.tensor_model_parallel_size, language.data_parallel_size) == (plan.tp, plan.dp)
        covered = [
            rank
            for grid in config.module_parallelisms.values()
            for rank in range(grid.rank_offset, grid.rank_offset + grid.total_ranks)
        ]
        assert sorted(covered) == list(range(plan.rank_count))


def test_encoders_on_a_mesh_of_their_own_are_a_grid_with_its_degrees() -> None:
    plan = meshed(job(devices=16), vision=(1, 4), llm=(2, 2), microbatch=2)
    config = parallelism(export_megatron_mimo(plan), 12)
    images = config.module_parallelisms["images"]
    assert (images.tensor_model_parallel_size, images.data_parallel_size, images.rank_offset) == (1, 4, 8)


@pytest.mark.parametrize(
    ("was", "put", "told"),
    [
        ("rank_offset=8", "rank_offset=4", "overlap"),
        ("rank_offset=8", "rank_offset=9", "gap"),
        ("expert_model_parallel_size=1", "expert_model_parallel_size=2", "dense"),
        ('"language"', '"llm"', "language"),
    ],
)
def test_wrong_grids_are_refused_by_megatron_bridge(was: str, put: str, told: str) -> None:
    made = export_megatron_mimo(meshed(job(devices=16), vision=(1, 4), llm=(2, 2), microbatch=2))
    text = made.files["mimo_plan.py"]
    assert was in text
    wrong = Exported(target="", version="", files={"mimo_plan.py": text.replace(was, put)})
    with pytest.raises(ValueError, match=told):
        parallelism(wrong, 12)
