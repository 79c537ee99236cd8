"""Which device a process computes on, and how long it waits."""

from dataclasses import replace

import pytest
import torch
from tiny_plans import TWO_STAGES, hand_plan, tiny_scenario

from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.devices import run_device
from mmplan.runtime.limits import default_timeout_s
from mmplan.scenario.catalogue import catalogue_device


def plan_for(device: str) -> Plan:
    scenario = replace(tiny_scenario(), global_batch=4)
    pools = tuple(replace(pool, device=catalogue_device(device).device) for pool in scenario.cluster.pools)
    return hand_plan(replace(scenario, cluster=replace(scenario.cluster, pools=pools)), TWO_STAGES)


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)


@pytest.mark.usefixtures("two_processes")
def test_each_process_takes_its_own_gpu_for_a_plan_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert run_device(plan_for("h100-sxm"), rehearse=False) == torch.device("cuda", 1)
    assert run_device(plan_for("h100-sxm"), rehearse=True) == torch.device("cpu")
    assert run_device(plan_for("cpu-core"), rehearse=False) == torch.device("cpu")


@pytest.mark.usefixtures("two_processes")
def test_two_processes_on_one_gpu_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match=r"^2 processes on this machine, and 1 CUDA devices: .*CUDA_VISIBLE_DEVICES= "):
        run_device(plan_for("h100-sxm"), rehearse=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert run_device(plan_for("h100-sxm"), rehearse=False) == torch.device("cpu")


def test_a_rank_may_wait_for_several_steps_whatever_their_length() -> None:
    plan = plan_for("cpu-core")
    assert plan.certificate.objective_s == 1.0
    assert default_timeout_s(plan, 1.0) == 60.0
    assert default_timeout_s(plan, 100.0) == 400.0
