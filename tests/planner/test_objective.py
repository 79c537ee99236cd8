"""Objectives beside the step time, each against searches with the number of devices pinned."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.errors import InfeasibleError, InputError
from mmplan.planner.check import check_plan
from mmplan.planner.objective import Objective, objective_of
from mmplan.planner.search import optimize
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario


@pytest.fixture(scope="module")
def job() -> Scenario:
    scenario = load_scenario(Path(__file__).parents[2] / "scenarios" / "qwen2.5-vl-7b-lora.yaml")
    return replace(scenario, constraints=replace(scenario.constraints, tp=(1, 2), cp=(1,)))


@pytest.fixture(scope="module")
def fastest_on(job: Scenario) -> dict[int, float]:
    """Devices -> the least step on exactly so many."""
    found = {}
    for devices in (1, 2, 4, 8):
        steps = []
        for tp in (1, 2):
            for pp in (1, 2, 4, 8):
                if devices % (tp * pp) == 0:
                    rules = replace(job.constraints, tp=(tp,), pp=(pp,), dp=(devices // (tp * pp),))
                    try:
                        plan = optimize(replace(job, constraints=rules), gap=0.0).plan
                    except InfeasibleError:
                        continue
                    steps.append(plan.certificate.objective_s)
        found[devices] = min(steps)
    return found


def test_device_time_is_least_over_all_numbers_of_devices(job: Scenario, fastest_on: dict[int, float]) -> None:
    plan = optimize(job, gap=0.0, objective=Objective(name="device-time")).plan
    assert check_plan(plan) == ()
    value = plan.rank_count * plan.certificate.objective_s
    assert value <= min(devices * step_s for devices, step_s in fastest_on.items()) * (1 + 1e-9)
    assert plan.rank_count * plan.certificate.bound_s == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_fewest_devices_for_a_deadline(job: Scenario, fastest_on: dict[int, float], devices: int) -> None:
    deadline_s = 1.001 * fastest_on[devices]
    result = optimize(job, gap=0.0, objective=Objective(name="devices", deadline_s=deadline_s))
    plan, told = result.plan, result.fewer
    assert plan.certificate.objective_s <= deadline_s
    assert plan.rank_count <= devices
    assert told is not None and told.least == plan.rank_count
    if told.step_bound_s is not None:  # no plan on fewer devices is below it, and none is within the deadline
        least_s = min((step_s for few, step_s in fastest_on.items() if few < plan.rank_count), default=math.inf)
        assert deadline_s < told.step_bound_s <= least_s
    fewer = [few for few, step_s in fastest_on.items() if step_s <= deadline_s and few < plan.rank_count]
    assert not fewer
    assert plan.certificate.status == "optimal"


def test_a_deadline_that_nothing_meets_is_told_with_the_least_step(job: Scenario) -> None:
    with pytest.raises(
        InfeasibleError, match=r"no plan of .* makes a step in 1 ms by the closed form of 1F1B: on at most 8 devices"
    ):
        optimize(job, objective=Objective(name="devices", deadline_s=1e-3))


def test_the_p90_plan_is_one_within_the_gap(job: Scenario) -> None:
    usual = optimize(job, gap=0.05)
    tail = optimize(job, gap=0.05, objective=Objective(name="p90-time")).plan
    assert tail.certificate.objective_s * (1 - 0.05) <= usual.plan.certificate.objective_s * (1 + 1e-9)


def test_objectives_by_name() -> None:
    assert objective_of("devices", 3.0) == Objective(name="devices", deadline_s=3.0)
    with pytest.raises(InputError, match=r"unknown objective 'device_time'; did you mean 'device-time'"):
        objective_of("device_time")
    with pytest.raises(InputError, match="needs --deadline"):
        objective_of("devices")
    with pytest.raises(InputError, match=r"--deadline: expected more than 0 s, found 0 s"):
        objective_of("devices", 0.0)
    with pytest.raises(InputError, match="use it with --objective devices"):
        objective_of("step-time", 3.0)
