"""Fronts of step time against memory and devices: every point a plan with its proof."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mmplan.errors import InfeasibleError, InputError
from mmplan.planner import repeated
from mmplan.planner.check import check_plan
from mmplan.planner.pareto_front import (
    FrontPoint,
    device_front,
    fullest_bytes,
    marked,
    memory_front,
    smaller_clusters,
    with_memory,
)
from mmplan.planner.plan import load_plan
from mmplan.planner.repeated import Limits
from mmplan.planner.result import OptimizeResult
from mmplan.planner.search import optimize
from mmplan.planner.stopping import never
from mmplan.report.pareto import axes_of, pareto_document, pareto_tables, plot_pareto, save_front
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"
GAP = 0.002  # what the update of a whole small model leaves open
LIMITS = Limits(gap=GAP)


@pytest.fixture(scope="module")
def tiny() -> Scenario:
    """Any pipeline, no device memory set aside: what a plan needs is layers alone."""
    scenario = load_scenario(SCENARIOS / "tiny.yaml")
    rules = replace(scenario.constraints, pp=())
    pools = tuple(replace(pool, device=replace(pool.device, reserved_bytes=0)) for pool in scenario.cluster.pools)
    return replace(scenario, constraints=rules, cluster=replace(scenario.cluster, pools=pools))


@pytest.fixture(scope="module")
def by_memory(tiny: Scenario) -> list[FrontPoint]:
    return list(memory_front(tiny, LIMITS, 5))


@pytest.fixture(scope="module")
def by_devices(tiny: Scenario) -> list[FrontPoint]:
    return list(device_front(tiny, LIMITS))


def test_less_memory_is_kept_and_never_makes_a_step_shorter(by_memory: list[FrontPoint]) -> None:
    assert len(by_memory) > 2
    for before, after in pairwise(by_memory):
        assert after.cost <= after.limit < before.cost
        assert after.step_s >= before.plan.certificate.bound_s
    assert all(fullest_bytes(point.plan) == point.cost for point in by_memory)


def test_a_point_is_the_optimum_under_its_limit(tiny: Scenario, by_memory: list[FrontPoint]) -> None:
    for point in by_memory[1:]:
        best = optimize(with_memory(tiny, point.limit), gap=GAP).plan
        assert point.step_s == pytest.approx(best.certificate.objective_s, rel=GAP)
        assert point.plan.certificate.status == "optimal"
        assert check_plan(point.plan) == ()


def test_below_the_last_point_nothing_fits(tiny: Scenario, by_memory: list[FrontPoint]) -> None:
    step = by_memory[0].cost // 5
    with pytest.raises(InfeasibleError):
        optimize(with_memory(tiny, by_memory[-1].cost - step))


def test_memory_leaves_the_headroom_free(tiny: Scenario) -> None:
    scenario = replace(tiny, constraints=replace(tiny.constraints, memory_headroom=0.2))
    device = with_memory(scenario, 8_000_000).cluster.pools[0].device
    assert device.memory_bytes == 10_000_000
    assert with_memory(scenario, 10**15) == scenario


def test_fewer_devices_never_make_a_step_shorter(by_devices: list[FrontPoint]) -> None:
    assert [point.limit for point in by_devices] == [4, 2, 1]
    assert [point.cost for point in by_devices] == [4, 2, 1]
    times = [point.step_s for point in by_devices]
    assert times == sorted(times)


def test_clusters_shrink_by_nodes_then_inside_one() -> None:
    cluster = load_scenario(SCENARIOS / "tiny.yaml").cluster
    pool = replace(cluster.pools[0], nodes=3, devices_per_node=6)
    sizes = [one.device_count for one in smaller_clusters(replace(cluster, pools=(pool,)))]
    assert sizes == [18, 12, 6, 3, 2, 1]
    other = replace(pool, nodes=2, devices_per_node=4)
    shrunk = list(smaller_clusters(replace(cluster, pools=(pool, other))))
    assert [tuple(p.nodes for p in one.pools) for one in shrunk[:4]] == [(3, 2), (3, 1), (2,), (1,)]


def test_a_point_that_another_one_beats_is_marked(by_memory: list[FrontPoint]) -> None:
    first, second = by_memory[:2]
    worse = replace(second, cost=first.cost + 1)
    other_axis = replace(worse, axis="devices")
    assert [point.dominated for point in marked([first, worse, other_axis, first])] == [False, True, False, False]


def test_ctrl_c_keeps_what_is_done_and_drops_what_is_not_proven(
    tiny: Scenario, by_devices: list[FrontPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the second plan is sought."""
    solved: list[OptimizeResult] = []

    def slow(scenario: Scenario, **options: Any) -> OptimizeResult:
        result = optimize(scenario, **{**options, "stop": never})
        certificate = replace(result.plan.certificate, status="feasible" if solved else "optimal")
        solved.append(replace(result, plan=replace(result.plan, certificate=certificate)))
        return solved[-1]

    monkeypatch.setattr(repeated, "optimize", slow)
    limits = replace(LIMITS, stop=lambda: len(solved) > 1)
    assert [point.limit for point in device_front(tiny, limits)] == [4]
    assert len(solved) == 2


def test_a_scenario_that_fits_nowhere_is_an_error(tiny: Scenario) -> None:
    with pytest.raises(InfeasibleError, match="no plan of tiny fits into memory"):
        next(memory_front(with_memory(tiny, 100_000), Limits(time_limit_s=10.0), 4))


def test_what_time_is_held_against_is_one_of_three_words() -> None:
    assert axes_of("both") == ("memory", "devices")
    assert axes_of("devices") == ("devices",)
    with pytest.raises(InputError, match=r"expected memory, devices or both, found 'memry'; did you mean 'memory'\?"):
        axes_of("memry")


def test_points_go_to_tables_document_picture_and_plans(
    by_memory: list[FrontPoint], by_devices: list[FrontPoint], tmp_path: Path
) -> None:
    points = marked([*by_memory, *by_devices])
    assert [table.row_count for table in pareto_tables("tiny", points)] == [len(by_memory), 3]
    document: dict[str, Any] = pareto_document("tiny", points, True)
    assert (document["schema"], document["complete"]) == ("mmplan.pareto/1", True)
    assert [one["limit"] for one in document["points"] if one["axis"] == "devices"] == [4, 2, 1]
    assert all(one["bound_s"] <= one["objective_s"] for one in document["points"])
    plot_pareto(points, tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
    save_front("tiny", points, tmp_path)
    assert load_plan(tmp_path / "tiny.devices-1.plan.json") == by_devices[0].plan
    assert len(list(tmp_path.glob("tiny.memory-*.plan.json"))) == sum(not p.dominated for p in points[: len(by_memory)])
