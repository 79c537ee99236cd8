"""Module grids of Megatron MIMO, read back by a few lines of our own: every rank of the plan in one grid."""

import re
from dataclasses import replace

import pytest
from meshed_toys import job, meshed
from random_plans import random_plan

from mmplan.errors import CheckError
from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.megatron_mimo import export_megatron_mimo
from mmplan.planner.plan import scenario_hash

MODELS = ("kimi-k2.5-1t", "internvl2.5-26b", "llava-1.5-7b-sft", "tiny")


def components(made: Exported) -> dict[str, dict[str, int]]:
    """Grid -> its degrees, from the words for the example scripts."""
    found = re.findall(r"^--component (\w+)=(\S+)$", made.files["components.args"], re.M)
    return {name: {k: int(v) for k, v in (pair.split("=") for pair in pairs.split(","))} for name, pairs in found}


def test_grids_of_random_plans_hold_every_rank_once(request: pytest.FixtureRequest) -> None:
    exported = 0
    for seed in range(request.config.getoption("--round-trips")):
        plan = random_plan(seed, MODELS)
        try:
            made = export_megatron_mimo(plan)
        except CheckError:
            continue
        exported += 1
        grids = components(made)
        spans = [(g["rank_offset"], g["tp"] * g["pp"] * g["cp"] * g["dp"]) for g in grids.values()]
        assert sorted(rank for first, count in spans for rank in range(first, first + count)) == list(
            range(plan.rank_count)
        )
        assert {key: grids["language"][key] for key in ("tp", "cp", "dp")} == {
            "tp": plan.tp,
            "cp": plan.cp,
            "dp": plan.dp,
        }
        assert all((plan.microbatch_size * plan.dp) % grid["dp"] == 0 for grid in grids.values())
    assert exported


def test_a_mesh_of_its_own_is_a_grid_of_its_own() -> None:
    plan = meshed(job(devices=16), vision=(1, 4), llm=(2, 2), microbatch=2)
    assert components(export_megatron_mimo(plan)) == {
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
