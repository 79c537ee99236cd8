"""Clusters of several kinds of devices: prices by pool, both orders searched, plans that hold the better one."""

from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest
from random_jobs import random_job

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.loads import mean_loads
from mmplan.errors import InputError, NoPlanFoundError
from mmplan.planner.check import check_plan
from mmplan.planner.interval import plan_interval
from mmplan.planner.pool_order import in_pool_orders
from mmplan.planner.search import optimize
from mmplan.planner.simulate import simulate
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

SCENARIO = Path(__file__).parents[2] / "scenarios" / "llama-3.2-11b-vision.yaml"
POOLS = (
    "cluster:\n  pools:\n    - {{device: {0}, nodes: 1, devices_per_node: 4}}\n"
    "    - {{device: {1}, nodes: 1, devices_per_node: 4, memory: {2}}}\n"
)


def mixed(folder: Path, *devices: str, memory: str = "40 GB", more: str = "") -> Scenario:
    text = SCENARIO.read_text()
    start = text.index("cluster:")
    rest = text[start:].split("\n", 1)[1]
    path = folder / "mixed.yaml"
    path.write_text(text[:start] + POOLS.format(*devices, memory) + more + rest)
    return load_scenario(path)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    scenario = mixed(tmp_path_factory.mktemp("mixed"), "h100-sxm", "a100-sxm-80")
    return replace(scenario, constraints=replace(scenario.constraints, cp=(1,), tp=(1, 2), microbatch=(1,)))


def test_a_layer_goes_at_the_pace_of_the_slowest_pool(job: Scenario) -> None:
    costs, layer, loads = AnalyticCostModel(job), build_graph(job).layer("llm.0"), mean_loads(job, 1)
    fast, slow, both = (
        costs.forward_s(layer, loads[layer.module], Layout(pools=pools)) for pools in ((0,), (1,), (0, 1))
    )
    assert fast < slow == both


def test_the_better_order_of_the_pools_is_in_the_plan_and_sound(job: Scenario) -> None:
    result = optimize(job, gap=0.0)
    assert check_plan(result.plan) == ()
    assert simulate(result.plan, build_graph(job), AnalyticCostModel(result.plan.scenario)).step_time_s > 0
    (other,) = (one for one in result.runner_ups if one.reason.startswith("with "))
    assert other.objective_s is not None
    assert other.objective_s >= result.plan.certificate.objective_s >= result.bound_s
    orders = [one.cluster.pools for one in in_pool_orders(job)]
    assert orders == [job.cluster.pools, job.cluster.pools[::-1]]
    assert result.plan.scenario.cluster.pools in orders


@pytest.mark.parametrize("seed", [19, 37])
def test_an_order_that_the_limit_left_unsolved_is_part_of_the_bound(seed: int) -> None:
    """Of these jobs the second order is the better one; the search is stopped before it begins."""
    job, told = random_job(seed), list[str]()
    job = replace(job, cluster=replace(job.cluster, pools=job.cluster.pools[::-1]))
    best_s = optimize(job, gap=0.0).plan.certificate.objective_s
    found = optimize(
        job,
        on_improvement=lambda progress: told.append(progress.doing),
        stop=lambda: told.count("reading model and data") > 1,
    )
    assert found.plan.certificate.objective_s > 1.01 * best_s
    assert found.plan.certificate.bound_s <= best_s
    assert found.status == "feasible"


def test_that_one_order_cannot_fit_proves_nothing_of_one_left_unsolved() -> None:
    """Of this job nothing fits where the smaller devices come first; the other order has plans."""
    job, told = random_job(250), list[str]()
    job = replace(job, cluster=replace(job.cluster, pools=job.cluster.pools[::-1]))
    assert optimize(job).plan.scenario.cluster.pools == job.cluster.pools[::-1]
    with pytest.raises(NoPlanFoundError, match="give it more time"):
        optimize(
            job,
            on_improvement=lambda progress: told.append(progress.doing),
            stop=lambda: told.count("reading model and data") > 1,
        )


def test_seconds_of_the_search_are_told_once_for_all_orders() -> None:
    job = random_job(19)
    started_s = perf_counter()
    result = optimize(job, gap=0.0)
    spent_s = perf_counter() - started_s
    assert len(list(in_pool_orders(job))) == 2
    assert 0 < result.plan.certificate.wall_s == result.wall_s <= spent_s


def test_a_stage_keeps_within_the_memory_of_its_own_pool(job: Scenario) -> None:
    plan = optimize(job).plan
    for index, stage in enumerate(plan.stages):
        pools = [plan.scenario.cluster.pool_of(rank) for rank in plan.stage_ranks(index)]
        usable = min(int(pool.device.memory_bytes * (1 - job.constraints.memory_headroom)) for pool in pools)
        assert stage.memory_bytes <= stage.capacity_bytes == usable


def test_equal_pools_are_one(tmp_path: Path) -> None:
    """Two pools of one kind plan as one cluster of as many devices."""
    twice = mixed(tmp_path, "h100-sxm", "h100-sxm", memory="85.5 GB")
    pools = (twice.cluster.pools[0],) * 2
    rules = replace(twice.constraints, cp=(1,), microbatch=(1,))
    two = replace(twice, cluster=replace(twice.cluster, pools=pools), constraints=rules)
    one = replace(two, cluster=replace(two.cluster, pools=(replace(pools[0], nodes=2),)))
    assert optimize(two).plan.certificate.objective_s == pytest.approx(optimize(one).plan.certificate.objective_s)


@pytest.mark.parametrize(
    ("devices", "memory", "more", "sentence"),
    [
        (("h100-sxm", "a100"), "40 GB", "", r"cluster.pools\[1\].device: unknown device 'a100'"),
        (("h100-sxm", "a100-sxm-80"), "1 MB", "", r"cluster.pools\[1\].memory: memory = 1,000,000 bytes, of which"),
        (("h100-sxm", "a100-sxm-80"), "40 GB", "  device: h100-sxm\n", "cluster.device: with 'pools' this is said of"),
    ],
)
def test_pools_that_cannot_be_are_refused(
    tmp_path: Path, devices: tuple[str, str], memory: str, more: str, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        mixed(tmp_path, *devices, memory=memory, more=more)


@pytest.mark.parametrize("devices", [(1, 3), (3, 1)])
def test_replicas_on_unlike_nodes_are_priced_as_the_checker_prices_them(devices: tuple[int, int]) -> None:
    tiny = load_scenario(SCENARIO.with_name("tiny.yaml"))
    (pool,) = tiny.cluster.pools
    pools = tuple(replace(pool, nodes=1, devices_per_node=count) for count in devices)
    unlike = replace(tiny, cluster=replace(tiny.cluster, pools=pools), constraints=replace(tiny.constraints, pp=(1,)))
    plan = optimize(unlike, gap=0.0).plan
    assert plan.rank_count == 4
    assert check_plan(plan) == ()


def test_a_number_of_one_device_moves_in_every_pool_that_has_it() -> None:
    tiny = load_scenario(SCENARIO.with_name("tiny.yaml"))
    (pool,) = tiny.cluster.pools
    half = replace(pool, devices_per_node=2)
    smaller = replace(half, device=replace(half.device, memory_bytes=2_000_000_000))
    whole, parted = (
        optimize(replace(tiny, cluster=replace(tiny.cluster, pools=pools)), schedule_search_s=0.0).plan
        for pools in ((replace(half, nodes=2),), (half, smaller))
    )
    one, other = plan_interval(whole, 1.0), plan_interval(parted, 1.0)
    assert (other.p10_s, other.p90_s) == pytest.approx((one.p10_s, one.p90_s))
