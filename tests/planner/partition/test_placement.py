"""Placements of DAGs: two exact methods against every assignment of small DAGs, and one derived by hand."""

import math
from dataclasses import replace

import pytest
from placement_toys import MICROSECOND, brute_force_s, placement_problem, random_placement_problem

from mmplan.errors import InfeasibleError, NoPlanFoundError
from mmplan.planner.partition import dp
from mmplan.planner.partition.cpsat import place_by_cpsat
from mmplan.planner.partition.downsets import list_downsets, list_prefixes, topological_keys
from mmplan.planner.partition.dp import make_table, search_under
from mmplan.planner.partition.groups import PS_PER_S, group_nodes
from mmplan.planner.partition.problem import PartitionProblem, Placement, busiest_load_s, mirrored_order
from mmplan.planner.partition.solve import least_load_ps, solve_partition
from mmplan.planner.stopping import Deadline


def enough() -> Deadline:
    """A minute from now."""
    return Deadline(limit_s=60)


EVERYTHING_PS = 10**9  # a millisecond, above any load of the random problems


def optimum_s(problem: PartitionProblem, max_downsets: int) -> float | None:
    try:
        result = solve_partition(problem, enough(), max_downsets=max_downsets)
    except InfeasibleError:
        return None
    assert result.optimal
    assert result.bound_s <= result.objective_s + 1e-15
    return result.objective_s


@pytest.mark.parametrize("seed", range(300))
def test_both_methods_reach_the_optimum_of_all_assignments(seed: int) -> None:
    problem = random_placement_problem(seed)
    expected_s = brute_force_s(problem)
    for max_downsets in (10_000, 1):
        found_s = optimum_s(problem, max_downsets)
        assert found_s == (None if expected_s is None else pytest.approx(expected_s, abs=1e-11))


@pytest.mark.parametrize("seed", range(300))
def test_the_dynamic_program_finds_the_optimum_of_cpsat_under_that_cap_and_nothing_below(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dp, "BLOCK", 2)  # of at most 64 downsets, so that blocks and windows matter
    groups = group_nodes(random_placement_problem(seed))
    found = place_by_cpsat(groups, 0, EVERYTHING_PS, enough()).found
    member = list_downsets(groups.groups, groups.edges, 1000)
    assert member is not None
    table = make_table(groups, member)
    if found is None:
        assert math.isinf(search_under(table, EVERYTHING_PS).value_ps)
    else:
        assert search_under(table, found.value_ps).value_ps == found.value_ps
        assert math.isinf(search_under(table, found.value_ps - 1).value_ps)


def test_random_problems_are_of_every_kind() -> None:
    problems = [random_placement_problem(seed) for seed in range(300)]
    values = [brute_force_s(problem) for problem in problems[:100]]
    assert 0 < sum(value is None for value in values) < 30
    assert sum(bool(problem.cpus and problem.accelerators) for problem in problems) > 50
    assert sum(len(set(problem.colour)) < problem.nodes for problem in problems) > 50
    assert sum(group_nodes(problem).groups < len(set(problem.colour)) for problem in problems) > 50


def test_grouping_without_merges_of_free_nodes_has_the_same_optimum() -> None:
    for seed in range(60):
        problem = random_placement_problem(seed)
        dust = tuple(size or 1e-9 for size in problem.size_bytes)  # below a byte, yet no group is free of it
        costly = replace(problem, size_bytes=dust, transfer_s=tuple(t + 1e-9 for t in problem.transfer_s))
        cheap = replace(problem, transfer_s=tuple(t + 1e-9 for t in problem.transfer_s))
        if sum(problem.size_bytes) + problem.nodes < problem.capacity_bytes:
            assert optimum_s(cheap, 10_000) == pytest.approx(optimum_s(costly, 10_000))


def test_an_output_is_paid_once_per_device_whatever_the_number_of_consumers() -> None:
    """Node 0 of 4 us feeds three nodes of 2 us. 0 | 1 2 3: both devices pay its 3 us once, loads 7 and 9; 0 1 | 2 3
    gives 9 and 7, all on one device 10. With a copy per consumer, 0 | 1 2 3 would take 13 and 15.
    """
    problem = placement_problem([4, 2, 2, 2], [(0, 1), (0, 2), (0, 3)], transfer_us=[3, 0, 0, 0])
    assert solve_partition(problem, enough()).objective_s == pytest.approx(9 * MICROSECOND)
    split = Placement(stage_of=(0, 1, 1, 1), on_cpu=(False, False))
    assert busiest_load_s(problem, split) == pytest.approx(9 * MICROSECOND)


def test_a_cpu_pays_no_transfers() -> None:
    """A CPU as fast as the accelerator takes one of two nodes: its transfer costs the accelerator 5 us, not the CPU."""
    problem = placement_problem([4, 9], [(0, 1)], transfer_us=[5, 0], cpu_s=(4e-6, 9e-6), accelerators=1, cpus=1)
    assert solve_partition(problem, enough()).objective_s == pytest.approx(9 * MICROSECOND)


def test_a_cap_that_the_sums_just_allow_is_not_cut_off() -> None:
    """10 us on the accelerator and 1 us, ten times slower, on the CPU: both take 10 us, and all devices are full.
    10 us as a double are just below, so 9,999,999 whole ps.
    """
    problem = placement_problem([10, 1], [(0, 1)], transfer_us=[0, 0], accelerators=1, cpus=1)
    groups = group_nodes(problem)
    member = list_downsets(groups.groups, groups.edges, 10)
    assert member is not None
    assert search_under(make_table(groups, member), 9_999_999).value_ps == 9_999_999


def test_a_free_node_stays_where_its_other_input_is() -> None:
    """Node 2 costs nothing, follows node 0, and reads node 1 at 10 us: 0 | 1 2 takes 5 us, 0 2 | 1 would take 15."""
    problem = placement_problem(
        [5, 5, 0], [(0, 2)], transfer_us=[0, 10, 0], consumers=((2,), (2,), ()), capacity_bytes=9.0
    )
    assert solve_partition(problem, enough()).objective_s == pytest.approx(5 * MICROSECOND)


def test_memory_forces_the_dearer_cut() -> None:
    """Nodes of 3, 1, 1, 3 bytes: with 8 bytes all fits one device, with 4 the cut is in the middle, at 7 us more."""
    problem = placement_problem(
        [1, 1, 1, 1], [(0, 1), (1, 2), (2, 3)], transfer_us=[0, 7, 0, 0], size_bytes=(3.0, 1.0, 1.0, 3.0)
    )
    assert solve_partition(replace(problem, capacity_bytes=4.0), enough()).objective_s == pytest.approx(9 * MICROSECOND)
    assert solve_partition(replace(problem, capacity_bytes=8.0), enough()).objective_s == pytest.approx(3 * MICROSECOND)
    with pytest.raises(InfeasibleError, match="8 bytes in groups of up to 3, 2 accelerators hold 3 bytes each"):
        solve_partition(replace(problem, capacity_bytes=3.0), enough())


def test_a_colour_on_both_sides_of_a_node_takes_the_node_along() -> None:
    """0 -> 1 -> 2 with 0 and 2 of one colour is a cycle of groups: all three share a device."""
    problem = placement_problem([1, 1, 1, 5], [(0, 1), (1, 2), (2, 3)], transfer_us=[0, 0, 0, 0], colour=(0, 1, 0, 3))
    assert group_nodes(problem).members == ((0, 1, 2), (3,))


def test_the_bound_from_sums_is_never_above_the_optimum() -> None:
    for seed in range(100):
        problem = random_placement_problem(seed)
        expected_s = brute_force_s(problem)
        if expected_s is not None:
            assert least_load_ps(group_nodes(problem)) <= expected_s * PS_PER_S + 1


def test_a_limit_below_the_optimum_is_proved_by_cpsat() -> None:
    problem = placement_problem([4, 2, 2, 2], [(0, 1), (0, 2), (0, 3)], transfer_us=[3, 0, 0, 0])
    answer = place_by_cpsat(group_nodes(problem), 0, 9_000_000 - 10, enough())
    assert answer.found is None
    assert answer.bound_ps == 9_000_000 - 9


def test_a_deadline_that_has_passed_finds_no_placement() -> None:
    problem = placement_problem([1, 1], [(0, 1)], transfer_us=[0, 0])
    with pytest.raises(NoPlanFoundError):
        solve_partition(problem, Deadline(limit_s=0, stop=lambda: True))


def test_two_chains_have_the_product_of_their_downsets() -> None:
    edges = [(0, 1), (1, 2), (3, 4)]
    downsets = list_downsets(5, edges, 100)
    assert downsets is not None
    assert len(downsets) == 4 * 3
    assert list_downsets(5, edges, 11) is None
    prefixes = {tuple(row) for row in list_prefixes(5, edges, topological_keys(5, edges)).tolist()}
    assert prefixes < {tuple(row) for row in downsets.tolist()}


def test_a_backward_node_without_forward_node_follows_the_turned_edge() -> None:
    """Forward 0 -> 1, backward 2 -> 3 -> 4; 2 and 4 share colours with 1 and 0, node 3 is alone."""
    edges = [(0, 1), (1, 2), (2, 3), (3, 4)]
    order = mirrored_order(edges, [False, False, True, True, True], [0, 1, 1, 3, 0])
    assert order == ((0, 1), (3, 2), (4, 3))


@pytest.mark.parametrize(
    ("stage_of", "on_cpu", "message"),
    [
        ((1, 0), (False, False), "leads back"),
        ((0, 1), (True, False), "1 CPUs"),
        ((0, 0), (False,), "2 bytes"),
    ],
)
def test_a_placement_that_breaks_a_rule_has_no_value(
    stage_of: tuple[int, ...], on_cpu: tuple[bool, ...], message: str
) -> None:
    problem = placement_problem([1, 1], [(0, 1)], transfer_us=[0, 0], capacity_bytes=1.0)
    with pytest.raises(ValueError, match=message):
        busiest_load_s(problem, Placement(stage_of=stage_of, on_cpu=on_cpu))
