"""Module grids of Megatron MIMO: encoders on meshes of their own, and what is refused."""

from dataclasses import replace

import pytest
from meshed_toys import job, meshed
from random_plans import random_plan
from read_back import mimo_components

from mmplan.errors import CheckError
from mmplan.planner.formats.megatron_mimo import export_megatron_mimo
from mmplan.planner.plan import scenario_hash


def test_a_mesh_of_its_own_is_a_grid_of_its_own() -> None:
    plan = meshed(job(devices=16), vision=(1, 4), llm=(2, 2), microbatch=2)
    assert mimo_components(export_megatron_mimo(plan)) == {
        "language": {"tp": 2, "pp": 2, "cp": 1, "dp": 2, "rank_offset": 0},
        "images": {"tp": 1, "pp": 1, "cp": 1, "dp": 4, "rank_offset": 8},
    }


def test_encoders_that_share_ranks_with_blocks_are_refused_with_the_stage() -> None:
    plan = next(p for p in map(random_plan, range(200)) if p.pp > 1 and "llm.0" in p.stages[0].layers and not p.spread)
    with pytest.raises(CheckError, match=r"stage 0 holds .*llm"):
        export_megatron_mimo(plan)


def test_ranks_without_work_are_refused() -> None:
    plan = meshed(job(devices=16), vision=(1, 4), llm=(2, 2), microbatch=2, first_rank=12)
    with pytest.raises(CheckError, match="ranks 8 to 11 have no module"):
        export_megatron_mimo(plan)


def test_odd_tensor_parallel_degrees_are_refused() -> None:
    plan = meshed(job(devices=16), vision=(1, 2), llm=(2, 2), microbatch=2)
    (mesh,) = plan.meshes
    odd = replace(plan, meshes=(replace(mesh, tp=3),), scenario_hash=scenario_hash(plan.scenario))
    with pytest.raises(CheckError):
        export_megatron_mimo(odd)
