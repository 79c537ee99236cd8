"""The least latency of one sample against trying every placement, and its derivation by hand."""

import contextlib
import itertools
import math

import numpy as np
import pytest

from mmplan.errors import InfeasibleError, NoPlanFoundError
from mmplan.planner.partition import latency
from mmplan.planner.partition.downsets import list_downsets
from mmplan.planner.partition.dp import make_table
from mmplan.planner.partition.groups import PS_PER_S, group_nodes
from mmplan.planner.partition.latency import CPU, MAX_DOWNSETS, latency_s, solve_latency
from mmplan.planner.partition.latency_bound import merged_labels
from mmplan.planner.partition.latency_labels import least_paths_ps, live_nodes
from mmplan.planner.partition.problem import PartitionProblem
from mmplan.planner.stopping import Deadline

MS = 1e-3


def random_dag(seed: int) -> PartitionProblem:
    """Up to seven nodes on two or three small accelerators; some run on one kind of device alone."""
    random = np.random.default_rng(seed)
    nodes = int(random.integers(3, 8))
    pairs = [(u, v) for u in range(nodes) for v in range(u + 1, nodes) if random.random() < 0.4]
    work_s = [MS * float(value) for value in random.integers(0, 9, nodes)]
    colour = list(range(nodes))
    if seed % 3 == 0:
        colour[-1] = colour[-2]
    return PartitionProblem(
        accelerator_s=tuple(math.inf if random.random() < 0.1 else value for value in work_s),
        cpu_s=tuple(value * float(random.integers(1, 6)) for value in work_s),
        size_bytes=tuple(float(value) for value in random.integers(0, 4, nodes)),
        transfer_s=tuple(MS * float(value) for value in random.integers(0, 4, nodes)),
        consumers=tuple(tuple(v for u, v in pairs if u == node) for node in range(nodes)),
        order=tuple(pairs),
        colour=tuple(colour),
        accelerators=int(random.integers(2, 4)),
        cpus=8,
        capacity_bytes=float(random.integers(3, 8)),
    )


def best_by_trying(problem: PartitionProblem) -> float:
    """Over every device of every node."""
    best = math.inf
    for device_of in itertools.product(range(CPU, problem.accelerators), repeat=problem.nodes):
        alike = set(zip(problem.colour, device_of, strict=True))
        if len(alike) == len(set(problem.colour)):
            try:
                best = min(best, latency_s(problem, device_of)[0])
            except ValueError:
                continue
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_latency_is_the_least_of_all_placements(seed: int) -> None:
    problem = random_dag(seed)
    best_s = best_by_trying(problem)
    if math.isinf(best_s):
        with pytest.raises(InfeasibleError):
            solve_latency(problem, Deadline(limit_s=60))
        return
    result = solve_latency(problem, Deadline(limit_s=60))
    assert result.optimal
    assert result.objective_s == pytest.approx(best_s)


@pytest.mark.parametrize("seed", range(12))
def test_no_placement_is_below_merged_labels(seed: int) -> None:
    problem = random_dag(seed)
    best_s, groups = best_by_trying(problem), group_nodes(problem)
    member = list_downsets(groups.groups, groups.edges, MAX_DOWNSETS)
    assert member is not None
    table, tail_ps = make_table(groups, member), least_paths_ps(problem)
    live = live_nodes(problem, groups, table.member)
    for most_s in (best_s, math.inf):
        merged = merged_labels(table, live, tail_ps, most_s * PS_PER_S, Deadline(limit_s=60))
        assert merged.bound_ps <= best_s * PS_PER_S


@pytest.mark.parametrize("seed", range(0, 12, 3))
def test_what_comes_before_the_deadline_or_of_few_downsets_is_valid(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_dag(seed)
    best_s = best_by_trying(problem)
    results = []
    for looks in range(0, 60, 4):
        left = itertools.chain(itertools.repeat(False, looks), itertools.repeat(True))
        with contextlib.suppress(NoPlanFoundError, InfeasibleError):
            results.append(solve_latency(problem, Deadline(limit_s=60, stop=lambda left=left: next(left))))
    monkeypatch.setattr(latency, "MAX_DOWNSETS", 2)
    with contextlib.suppress(NoPlanFoundError):
        results.append(solve_latency(problem, Deadline(limit_s=60)))
    assert bool(results) == math.isfinite(best_s)
    assert all(result.bound_s <= best_s + 1e-9 and result.objective_s >= best_s - 1e-9 for result in results)


def test_accelerators_work_beside_each_other_and_pay_for_what_crosses() -> None:
    """A source of 1 ms feeds two branches of 10 ms that meet in 1 ms; a transfer takes 0.5 ms. One accelerator for all
    would take 22 ms, but holds three nodes. With source and end on the CPU the branches run at a time."""
    problem = PartitionProblem(
        accelerator_s=(1 * MS, 10 * MS, 10 * MS, 1 * MS),
        cpu_s=(1 * MS, 100 * MS, 100 * MS, 1 * MS),
        size_bytes=(1.0, 1.0, 1.0, 1.0),
        transfer_s=(0.5 * MS,) * 4,
        consumers=((1, 2), (3,), (3,), ()),
        order=((0, 1), (0, 2), (1, 3), (2, 3)),
        colour=(0, 1, 2, 3),
        accelerators=2,
        cpus=8,
        capacity_bytes=3.0,
    )
    result = solve_latency(problem, Deadline(limit_s=60))
    # 1 on the CPU, 0.5 in, 10, 0.5 out on both accelerators at a time, 1 on the CPU
    assert result.objective_s == pytest.approx(13 * MS)
    assert result.device_of[0] == result.device_of[3] == CPU
    assert result.cores == 1
