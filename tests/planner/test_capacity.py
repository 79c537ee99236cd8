"""What the capacity bound proves about the busiest stage, against brute force and by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from brute_force import numbered, partition_value, random_problem, stage_works

from mmplan.planner.capacity import Rows, busiest_floors
from mmplan.planner.cut_problem import CutEdge, CutProblem
from mmplan.planner.floors import bottleneck_floor, memory_may_fit
from mmplan.planner.space import build_space
from mmplan.planner.stage_order import ancestors, chain_cover, tail_start
from mmplan.scenario.load import load_scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"


def floor_of(problem: CutProblem) -> int | None:
    """The floor of one problem; None where it proves that nothing fits."""
    one = np.array([problem.stages], dtype=np.int64)
    rows = Rows(problem=one * 0, stages=one, microbatches=one * 0 + problem.microbatches)
    floors_ns, may = busiest_floors([problem], rows, np.array([bottleneck_floor(problem)], dtype=np.int64))
    return int(floors_ns[0]) if may[0] else None


def least_busiest(problem: CutProblem) -> int | None:
    """By brute force: the least work of the busiest stage over all cuts that fit."""
    best: int | None = None
    for block_of in numbered(problem):
        if partition_value(problem, block_of) is None:
            continue
        work = max((alone for alone, _ in stage_works(problem, block_of) or ()), default=0)
        best = work if best is None else min(best, work)
    return best


@pytest.mark.parametrize("seed", range(600, 900))
def test_no_cut_has_a_lighter_busiest_stage(seed: int) -> None:
    problem = random_problem(seed)
    tight = problem.with_capacity(max(1, int(0.8 * problem.capacity_bytes)))
    for one in (problem, tight):
        floor_ns, best = floor_of(one), least_busiest(one)
        assert best is None or (floor_ns is not None and floor_ns <= best)


def test_on_a_chain_the_floor_is_the_optimum() -> None:
    """Exact up to where bisection ends: 0.05 %."""
    random = np.random.default_rng(5)
    bound_by_memory = 0
    for _ in range(60):
        groups = int(random.integers(4, 9))
        problem = CutProblem(
            work_ns=tuple(int(w) for w in random.integers(10_000, 90_000, groups)),
            state_bytes=tuple(int(w) for w in random.integers(1, 9, groups)),
            kept_bytes=tuple(int(w) for w in random.integers(0, 6, groups)),
            finish_ns=(0,) * groups,
            trainable=(True,) * groups,
            edges=tuple(CutEdge(producer=g, consumer=g + 1, lag_ns=0) for g in range(groups - 1)),
            finish_fixed_ns=0,
            capacity_bytes=int(random.integers(20, 60)),
            stages=int(random.integers(2, min(groups, 4) + 1)),
            microbatches=6,
            schedule="1f1b",
        )
        floor_ns, best = floor_of(problem), least_busiest(problem)
        if best is not None:
            assert floor_ns is not None
            assert 0.999 * best <= floor_ns <= best
            bound_by_memory += bottleneck_floor(problem) < 0.9 * best
    assert bound_by_memory > 10


def test_early_stages_take_fewer_layers_as_they_hold_more_microbatches() -> None:
    """12 layers of 10 ns in 3 stages; the stage j-th from the end holds j microbatches, so 12 // j layers fit.

    4 + 4 + 4 layers fit exactly with T = 40; with 11 bytes the first stage takes 3, so some other one needs 5.
    """
    layers = 12
    problem = CutProblem(
        work_ns=(10,) * layers,
        state_bytes=(0,) * layers,
        kept_bytes=(1,) * layers,
        finish_ns=(0,) * layers,
        trainable=(True,) * layers,
        edges=tuple(CutEdge(producer=g, consumer=g + 1, lag_ns=0) for g in range(layers - 1)),
        finish_fixed_ns=0,
        capacity_bytes=12,
        stages=3,
        microbatches=8,
        schedule="1f1b",
    )
    assert floor_of(problem) == 40
    assert floor_of(replace(problem, capacity_bytes=11)) == 50
    assert memory_may_fit(replace(problem, capacity_bytes=5), np.array([3]), np.array([8]))[0]  # by an even spread
    assert floor_of(replace(problem, capacity_bytes=5)) is None  # 5 + 2 + 1 layers
    assert floor_of(replace(problem, schedule="gpipe", capacity_bytes=11)) is None  # 8 in flight, 1 layer each
    assert floor_of(replace(problem, schedule="gpipe", capacity_bytes=32)) == 40


def test_stages_side_by_side_hold_as_many_microbatches_as_one() -> None:
    """Two encoders of 3 layers and a head, 3 stages: each encoder alone is second from the end, 3 layers x 2 bytes.

    In one row they would hold 2 x 3 and 3 x 3 bytes.
    """
    edges = [(0, 1), (1, 2), (3, 4), (4, 5), (2, 6), (5, 6)]
    problem = CutProblem(
        work_ns=(10,) * 6 + (30,),
        state_bytes=(0,) * 7,
        kept_bytes=(1,) * 7,
        finish_ns=(0,) * 7,
        trainable=(True,) * 7,
        edges=tuple(CutEdge(producer=u, consumer=v, lag_ns=0) for u, v in sorted(edges)),
        finish_fixed_ns=0,
        capacity_bytes=6,
        stages=3,
        microbatches=8,
        schedule="1f1b",
    )
    assert floor_of(problem) == least_busiest(problem) == 30


def test_a_graph_tells_its_tail_and_its_width() -> None:
    edges = [(0, 1), (2, 3), (1, 4), (3, 4), (4, 5)]
    assert tail_start(6, edges) == 4
    assert chain_cover(4, edges) == 2
    assert tail_start(6, [*edges[:-1], (1, 5)]) == 6  # the last one does not follow all
    assert tail_start(3, [(0, 1), (1, 2)]) == 0
    assert [sorted(np.flatnonzero(row).tolist()) for row in ancestors(3, [(0, 1), (1, 2)])] == [[], [0], [0, 1]]


def test_memory_that_binds_leaves_few_configurations() -> None:
    """Published scale: of 1,622 configurations that fit by an even spread, 34 do when the first stages hold most."""
    scenario = load_scenario(SCENARIOS / "qwen3-vl-235b-a22b.yaml")
    plain = replace(scenario.constraints, cp=(1,), ep=(1,), sharding=("none",), recompute=("none",), spread=())
    space = build_space(replace(scenario, constraints=plain))
    space.bounds.sharpen(np.arange(len(space.configurations)))
    fits = space.bounds_ns < space.bounds_ns.max()
    assert 0 < fits.sum() < 100
