"""The least cost of a step over unlike pools with prices, against trying everything; and what is said of costs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from meshed_jobs import best_meshed_by_trying
from pipeline_toys import DEVICE
from random_jobs import best_by_trying, price_per_hour, priced_job

from mmplan.errors import InfeasibleError, InputError
from mmplan.planner import plan_cost
from mmplan.planner.check import check_plan
from mmplan.planner.first_bounds import NEVER
from mmplan.planner.objective import Objective, scale_of
from mmplan.planner.plan import Plan
from mmplan.planner.search import optimize
from mmplan.planner.weights import LONGEST_NS, price_weights
from mmplan.scenario.asked import OwnRanks
from mmplan.scenario.cluster import Cluster
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

COST = Objective(name="cost")
TINY = Path(__file__).parents[2] / "scenarios" / "tiny.yaml"
# `benchmarks/brute_force.py` tries 100. Plans of 2, 13 and 31 use both pools, that of 14 a part of one; none of 6 fits.
SEEDS = [2, 6, 13, 14, 25, 31, 34]


def require_the_least(plan: Plan, best: float) -> None:
    """Up to the launch of an operator, see `problem.py`."""
    price = plan_cost.price_per_hour(plan)
    assert price is not None
    close = price * DEVICE.launch_s
    assert price * plan.certificate.objective_s == pytest.approx(best, abs=close)
    assert price * plan.certificate.bound_s <= best + close
    assert plan.certificate.gap <= 0.005  # steps are some thousand nanoseconds, each layer's rounded down
    assert check_plan(plan) == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_plan_costs_least_of_everything(seed: int) -> None:
    job = priced_job(seed)
    best, _ = best_by_trying(job, price_per_hour)
    if best is None:
        with pytest.raises(InfeasibleError):
            optimize(job, gap=0.0, objective=COST)
        return
    require_the_least(optimize(job, gap=0.0, objective=COST).plan, best)


def apart_job(seed: int, memory: float) -> Scenario:
    """Vision has ranks of its own, on a dear pool of two or a cheap pool of three with a part of its memory."""
    job = priced_job(seed)
    dear = replace(job.cluster.pools[0], nodes=1, devices_per_node=2, price_per_hour=4.1)
    small = replace(dear.device, memory_bytes=1000 + int(memory * (dear.device.memory_bytes - 1000)))
    pools = (dear, replace(dear, device=small, devices_per_node=3, price_per_hour=0.35))
    rules = replace(job.constraints, pp=(), modules=(OwnRanks(module="vision"),))
    return replace(job, cluster=replace(job.cluster, pools=pools), constraints=rules)


@pytest.mark.parametrize(
    ("seed", "memory", "idle"),
    # the language model fits on the dear pool alone, of which it leaves a rank idle; then on the cheap one
    [(75, 0.3, 1), (62, 0.3, 1), (25, 0.5, 0)],
)
def test_the_plan_costs_least_with_meshes_of_their_own_and_idle_ranks(seed: int, memory: float, idle: int) -> None:
    job = apart_job(seed, memory)
    best, _ = best_meshed_by_trying(job, None, price_per_hour)
    assert best is not None
    plan = optimize(job, gap=0.0, objective=COST).plan
    require_the_least(plan, best)
    assert plan.world - plan.rank_count == idle


def priced(cluster: Cluster, *prices: float, devices: int = 4) -> Cluster:
    pools = (replace(cluster.pools[0], devices_per_node=devices, price_per_hour=price) for price in prices)
    return replace(cluster, pools=tuple(pools))


def test_a_value_is_the_price_of_the_first_ranks_times_the_step() -> None:
    """2 x 2.5 + 0.5 = 5.5 per hour, in units of 0.5: 11."""
    cluster = priced(load_scenario(TINY).cluster, 2.5, 0.5, devices=2)
    scale = scale_of(COST, cluster, np.array([3, 1]))
    assert scale.value(0, 1000) == 11_000
    assert scale.values(np.array([1000, NEVER])).tolist() == [11_000, NEVER]
    assert scale.value_on(3, 1000) == 7_000  # two of the cheap ones and a dear one
    assert scale.values_on(np.array([3, 1]), np.array([1000, 1000])).tolist() == [7_000, 1_000]
    assert [scale.step_below(0, value) for value in (11_000, 11_001)] == [1000, 1001]


def test_values_of_many_dear_devices_stay_whole_numbers() -> None:
    """A step of a day on 100,000 devices at prices of seven digits, in numbers of 63 bits."""
    cluster = priced(load_scenario(TINY).cluster, 98.76543, 12.34567, devices=50_000)
    scale = scale_of(COST, cluster, np.array([100_000, 50_001, 1]))
    for ranks, step_ns in ((100_000, LONGEST_NS), (50_001, 1_000_000_007), (1, 1_000_000_007)):
        row = scale.ranks.tolist().index(ranks)
        value = scale.value(row, step_ns)
        assert 0 < value < NEVER
        assert scale.values(np.full(3, step_ns)).tolist()[row] == value
        assert scale.step_below(row, value) == pytest.approx(step_ns, rel=1e-9)
        assert scale.step_below(row, value) <= step_ns
    exact = 98.76543 / 12.34567
    weights = price_weights(cluster)
    assert int(weights.first[1]) / int(weights.least[1]) == pytest.approx(exact, rel=1e-6)


def test_a_step_costs_what_its_ranks_cost_for_as_long_as_it_takes() -> None:
    """Two ranks at 2 and one at 5 for 6 minutes: 0.9."""
    job = load_scenario(TINY)
    job = replace(job, cluster=priced(job.cluster, 2.0, 5.0, devices=2))
    job = replace(job, constraints=replace(job.constraints, pp=(3,), dp=(1,)))
    plan = optimize(job).plan
    prices = sorted(pool.price_per_hour or 0.0 for pool in plan.scenario.cluster.pools)
    assert prices == [2.0, 5.0]
    dear_first = plan.scenario.cluster.pools[0].price_per_hour == 5.0
    assert plan_cost.price_per_hour(plan) == (12.0 if dear_first else 9.0)
    cheap = optimize(job, objective=COST).plan
    assert plan_cost.price_per_hour(cheap) == 9.0
    cost = plan_cost.cost_of(cheap, 360.0)
    assert cost is not None
    assert cost.per_step == pytest.approx(0.9)
    assert cost.per_million_tokens == pytest.approx(0.9e6 / plan_cost.tokens_of(job))


def test_prices_alone_leave_the_fastest_plan_and_its_search_as_they_are() -> None:
    job = load_scenario(TINY)
    plain, dear = optimize(job), optimize(replace(job, cluster=priced(job.cluster, 3.0)))
    assert dear.plan.stages == plain.plan.stages
    assert dear.considered == plain.considered


def test_costs_need_the_price_of_every_pool() -> None:
    job = load_scenario(TINY)
    with pytest.raises(InputError, match=r"^cluster.price_per_hour: this key is missing, and --objective cost needs"):
        optimize(job, objective=COST)
    half = priced(job.cluster, 2.0, 2.0)
    half = replace(half, pools=(half.pools[0], replace(half.pools[1], price_per_hour=None)))
    with pytest.raises(InputError, match=r"^cluster.pools.1.price_per_hour: "):
        optimize(replace(job, cluster=half), objective=COST)
