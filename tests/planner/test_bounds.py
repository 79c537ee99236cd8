"""The lower bounds never exceed what an exact method reaches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brute_force import brute_force, random_problem
from pipeline_toys import scenario as toy_scenario

from mmplan.planner.bounds import NEVER, lower_bounds
from mmplan.planner.chunk_solver import solve_chunks
from mmplan.planner.cut_plan import cut_stages
from mmplan.planner.floors import bottleneck_floor, finish_floor, heaviest_paths, memory_may_fit
from mmplan.planner.problem import affine_below, build_problem
from mmplan.planner.space import build_space, stage_layers
from mmplan.planner.stage_solver import solve_cut
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Constraints
from mmplan.scenario.technique import Compression

SCENARIOS = Path(__file__).parents[2] / "scenarios"


@pytest.mark.parametrize("seed", range(300, 500))
def test_the_floors_of_a_random_problem_are_below_its_optimum(seed: int) -> None:
    problem = random_problem(seed)
    best = brute_force(problem)
    stages, microbatches = np.array([problem.stages]), np.array([problem.microbatches])
    if not memory_may_fit(problem, stages, microbatches)[0]:
        assert best is None
    if best is not None:
        path = int(heaviest_paths(problem).max())
        assert (problem.microbatches - 1) * bottleneck_floor(problem) + path + finish_floor(problem) <= best


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("tiny", {}),
        ("tiny", {"recompute": ("full",)}),  # one of eight blocks at least, which are alike but for their turn
        ("llava-1.5-7b-sft", {}),
        ("llama-3.2-11b-vision", {}),
        ("llava-1.5-7b-pretrain", {"sharding": ("parameters",)}),  # a frozen tower is gathered for the forward alone
    ],
)
def test_the_bound_of_every_configuration_is_below_its_best_cut(name: str, rules: dict[str, Any]) -> None:
    scenario = load_scenario(SCENARIOS / f"{name}.yaml")
    space = build_space(replace(scenario, constraints=replace(scenario.constraints, **rules)))
    assert space.exact
    tight = 0
    blunt_ns = space.bounds_ns.copy()
    space.bounds.sharpen(np.arange(len(space.configurations)))
    assert (blunt_ns <= space.bounds_ns).all()
    some = range(0, len(space.configurations), 1 + len(space.configurations) // 400)
    for configuration, bound_ns in ((space.configurations[index], space.bounds_ns[index]) for index in some):
        problem = build_problem(space.prices, space.groups, configuration)
        if configuration.vp == 1:
            best = solve_cut(problem, space.coarse.upsets)
            assert not best.exhausted
        else:
            best = solve_chunks(problem, configuration.vp)
        if best.stage_of is not None and best.objective_ns is not None:
            stages = stage_layers(space.groups, best.stage_of, configuration.stages)
            _, time = cut_stages(space.prices, configuration, stages)
            assert bound_ns <= time.objective_s * 1e9
            tight += bound_ns >= 0.8 * best.objective_ns
        if bound_ns == NEVER:
            assert best.stage_of is None
    assert tight > 0


def test_a_bound_counts_no_more_than_the_rows_that_sequence_parallel_ranks_send() -> None:
    """Over links so slow that little else counts."""
    toy = toy_scenario(llm_layers=4, constraints=Constraints(tp=(2,), pp=(2,), dp=(1,), microbatch=(8,)))
    pools = tuple(replace(pool, node_link=replace(pool.node_link, bytes_per_s=1e3)) for pool in toy.cluster.pools)
    link = replace(toy.cluster.network_link, bytes_per_s=1e3)
    job = replace(
        toy,
        cluster=replace(toy.cluster, pools=pools, network_link=link),
        technique=replace(toy.technique, sequence_parallel=True),
    )
    space = build_space(job)
    space.bounds.sharpen(np.arange(len(space.configurations)))
    for configuration, bound_ns in zip(space.configurations, space.bounds_ns, strict=True):
        best = solve_cut(build_problem(space.prices, space.groups, configuration), space.coarse.upsets)
        assert best.objective_ns is not None and bound_ns <= best.objective_ns


@pytest.mark.parametrize("compression", ["none", "topk"])
def test_a_bound_does_not_depend_on_what_is_bounded_beside_it(compression: Compression) -> None:
    """Of one layout some configurations stay in a node, and single replicas keep nothing of compressed gradients."""
    scenario = load_scenario(SCENARIOS / "tiny.yaml")
    cluster = scenario.cluster
    pools = tuple(replace(pool, nodes=2, devices_per_node=4) for pool in cluster.pools)
    slow = replace(cluster.network_link, latency_s=1.0, bytes_per_s=1e6)
    job = replace(
        scenario,
        cluster=replace(cluster, pools=pools, network_link=slow),
        constraints=replace(scenario.constraints, pp=(1, 2, 4, 8), vp=(1, 2)),
        technique=replace(scenario.technique, compression=compression),
    )
    space = build_space(job)
    some = list(space.configurations)[:: 1 + len(space.configurations) // 60]
    together = lower_bounds(space.prices, space.groups, some[::-1])
    for index, one in enumerate(some[::-1]):
        assert lower_bounds(space.prices, space.groups, [one]).step_ns[0] == together.step_ns[index]


def test_equal_layers_cannot_be_halved() -> None:
    problem = replace(random_problem(0), stages=2)
    seven = replace(
        problem,
        work_ns=(10,) * 7,
        state_bytes=(1,) * 7,
        kept_bytes=(0,) * 7,
        finish_ns=(0,) * 7,
        trainable=(False,) * 7,
        edges=(),
    )
    assert bottleneck_floor(seven) == 40  # four of seven in one stage, not 35


def test_the_affine_price_is_below_the_real_one() -> None:
    def update_s(parameters: int) -> float:
        return max(3e-6, parameters * 1e-9) + 2e-5

    sizes = [10, 1000, 5000, 100_000, 1_000_000]
    fixed_s, per_parameter_s = affine_below(update_s, sizes)
    for size in sizes:
        assert fixed_s + per_parameter_s * size <= update_s(size) + 1e-15
    assert per_parameter_s == pytest.approx(1e-9)
