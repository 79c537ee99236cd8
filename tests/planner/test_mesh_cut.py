"""The cut of configurations with meshes: equal to trying every partition, and to real seconds."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from brute_force import brute_force
from pipeline_toys import DEVICE, scenario

from mmplan.cost_models.layout import Layout
from mmplan.planner.check import check_plan
from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import cut_stages, plan_from_cut
from mmplan.planner.cut_problem import evaluate_cut
from mmplan.planner.mesh import Mesh
from mmplan.planner.mesh_problem import meshed_groups, meshed_problem
from mmplan.planner.priced_groups import priced_groups
from mmplan.planner.quantise import seconds
from mmplan.planner.space import stage_layers
from mmplan.planner.stage_solver import solve_cut
from mmplan.scenario.scenario import Constraints, Scenario

CASES = 40


def random_meshed(seed: int) -> tuple[Scenario, Configuration, tuple[tuple[str, ...], ...]]:
    """A small job, often short of memory, and a configuration whose encoders have ranks of their own."""
    random = np.random.default_rng(seed)
    two = bool(random.random() < 0.4)
    job = scenario(
        vision_layers=int(random.integers(1, 3)),
        audio_layers=int(two),
        llm_layers=int(random.integers(1, 3)),
        frozen_vision=bool(random.random() < 0.3),
        global_batch=16,
        devices=64,
        constraints=Constraints(memory_headroom=0.0),
    )
    (pool,) = job.cluster.pools
    device = replace(pool.device, memory_bytes=1000 + int(10 ** random.uniform(4.6, 5.6)))
    job = replace(job, cluster=replace(job.cluster, pools=(replace(pool, device=device),)))
    apart = [("vision", "vision_projector")]
    if two and random.random() < 0.7:
        apart.append(("audio", "audio_projector"))
    if two and len(apart) == 1 and random.random() < 0.5:
        apart = [(*apart[0], "audio", "audio_projector")]
    dp, size = int(random.choice([1, 2, 4])), int(random.choice([1, 2, 4]))
    tp, stages = int(random.choice([1, 2])), int(random.integers(1, 3))
    meshes, rank = [], tp * dp * stages
    depths = []
    for modules in apart:
        wide = int(random.choice([d for d in (1, 2, 4, 8) if dp * size % d == 0]))
        meshes.append(Mesh(modules=modules, tp=int(random.choice([1, 2])), dp=wide, first_rank=rank + rank % 2))
        depths.append(int(random.integers(1, 3)))
        rank = meshes[-1].first_rank + meshes[-1].ranks * depths[-1]
    configuration = Configuration(
        tp=tp,
        dp=dp,
        pp=stages + sum(depths),
        microbatch_size=size,
        microbatches=16 // dp // size,
        schedule="1f1b" if random.random() < 0.8 else "gpipe",
        sharding=str(random.choice(["none", "optimizer", "parameters"])),  # type: ignore[arg-type]
        meshes=tuple(meshes),
        mesh_stages=tuple(depths),
    )
    return job, configuration, tuple(apart)


@pytest.mark.parametrize("seed", range(CASES))
def test_the_meshed_cut_is_that_of_trying_every_partition(seed: int) -> None:
    for draw in count(seed, CASES):  # until one has no more partitions than can be tried
        job, configuration, apart = random_meshed(draw)
        priced = priced_groups(job)
        meshed = meshed_groups(priced.groups, apart)
        assert meshed is not None
        problem = meshed_problem(priced.prices, meshed, configuration)
        if problem.stages <= problem.groups <= 9:
            break
    found = solve_cut(problem, meshed.upsets)
    assert not found.exhausted
    assert found.objective_ns == brute_force(problem)
    if found.stage_of is None:
        return
    value = evaluate_cut(problem, found.stage_of)
    assert value.fits
    stages = stage_layers(priced.groups, found.stage_of, configuration.pp)
    built, time = cut_stages(priced.prices, configuration, stages)
    # whole nanoseconds are rounded down, and the affine end of a step is exact up to the launch of one operator
    assert abs(time.objective_s - seconds(found.objective_ns)) <= DEVICE.launch_s
    for stage, level in zip(built, value.stage_levels, strict=True):  # levels that drop the same have the plainest name
        layers = [priced.prices.graph.layer(layer) for layer in stage.layers]
        assert [Layout(recompute=stage.recompute).recomputed(layer) for layer in layers] == [
            Layout(recompute=level).recomputed(layer) for layer in layers
        ]
    plan = plan_from_cut(priced.prices, configuration, stages, bound_s=0.0, status="given", wall_s=0.0)
    assert check_plan(plan) == ()


def test_groups_that_join_unlike_meshes_leave_no_meshed_cut() -> None:
    job = scenario(vision_layers=1, llm_layers=1)
    joined = replace(job, constraints=replace(job.constraints, no_split=("vision_projector.0",)))
    assert meshed_groups(priced_groups(joined).groups, (("vision", "vision_projector"),)) is None
    assert meshed_groups(priced_groups(job).groups, (("vision", "vision_projector"),)) is not None
    assert meshed_groups(priced_groups(job).groups, (("llm",),)) is None  # feeds nothing, and vision would come later
