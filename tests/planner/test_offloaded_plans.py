"""Optimizer states, or weights too, in host memory as an axis: seconds, memory, constraint, advice, bounds."""

from dataclasses import replace
from pathlib import Path

import pytest
from random_jobs import cuts_above_bounds

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.layer_time import optimizer_seconds
from mmplan.cost_models.layout import Layout, Trained
from mmplan.cost_models.time_rules import scenario_rules
from mmplan.errors import InfeasibleError, InputError
from mmplan.planner.check import check_plan
from mmplan.planner.pins import broken_rule, parse_pins
from mmplan.planner.repeated import Limits
from mmplan.planner.search import optimize
from mmplan.planner.why_not import why_not
from mmplan.scenario.catalogue import catalogue_device, device_names
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

SCENARIO = """
name: one-device
model:
  modules:
    llm: {kind: language_model, layers: 4, hidden: 1024, heads: 16, kv_heads: 16, ffn: 4096, vocabulary: 32000}
data: {text_tokens: 1024}
batch: {global: 2}
precision: bf16
cluster: {device: a100-sxm-80, nodes: 1, devices_per_node: 1, memory: %s}
constraints: {recompute: none, microbatch: 1, offload: %s}
"""


def one_device(tmp_path: Path, memory: str, offload: str = "[none]") -> Scenario:
    path = tmp_path / "one.yaml"
    path.write_text(SCENARIO % (memory, offload))
    return load_scenario(path)


def test_every_accelerator_of_the_catalogue_names_its_host_link() -> None:
    for name in device_names():
        rate = catalogue_device(name).device.host_bytes_per_s
        assert (rate is None) == (name == "cpu-core"), name


def test_seconds_are_copies_and_the_hosts_update(tmp_path: Path) -> None:
    """1e9 fp32 gradients go out over PCIe 4, then CPU-Adam takes 257 ms, longer than 16-bit weights take back."""
    of = one_device(tmp_path, "80 GiB")
    away = replace(of, technique=replace(of.technique, offload="optimizer"))
    found = optimizer_seconds(scenario_rules(away), away.optimizer, 1e9)
    rate = catalogue_device("a100-sxm-80").device.host_bytes_per_s
    assert rate == pytest.approx(31.5e9, rel=0.35)
    assert rate is not None
    assert found == pytest.approx(4e9 / rate + 0.257)
    assert found > 10 * optimizer_seconds(scenario_rules(of), of.optimizer, 1e9)


def test_what_does_not_fit_is_told_what_offloading_would_cost(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError, match=r"constraints\.offload \[optimizer\] \(at least some \d.* per step"):
        optimize(one_device(tmp_path, "4 GiB"))


def test_where_it_is_allowed_it_is_taken_if_nothing_else_fits(tmp_path: Path) -> None:
    plan = optimize(one_device(tmp_path, "4 GiB", "[none, optimizer]")).plan
    assert plan.scenario.technique.offload == "optimizer"
    assert check_plan(plan) == ()


def test_with_room_the_states_stay_on_the_device(tmp_path: Path) -> None:
    free = one_device(tmp_path, "80 GiB", "[none, optimizer]")
    result = optimize(free, gap=0.0)
    assert result.plan.scenario.technique.offload == "none"
    assert any("optimizer state in host memory" in other.reason for other in result.runner_ups)
    answer = why_not(free, result.plan, parse_pins("offload=optimizer", free), Limits(gap=0.0))
    assert answer.verdict == "slower"
    assert answer.finish_more_s is not None
    assert answer.finish_more_s > 0


def test_an_unknown_host_link_is_refused(tmp_path: Path) -> None:
    of = one_device(tmp_path, "80 GiB", "[optimizer]")
    pools = tuple(replace(p, device=replace(p.device, host_bytes_per_s=None)) for p in of.cluster.pools)
    unknown = replace(of, cluster=replace(of.cluster, pools=pools))
    with pytest.raises(InputError, match="to host memory is not in the catalogue"):
        optimize(unknown)
    assert broken_rule(unknown, parse_pins("offload=optimizer", unknown)).startswith("the link of a100-sxm-80 to host")


def test_weights_in_host_memory_travel_with_every_microbatch(tmp_path: Path) -> None:
    """By hand: a rank's own share over PCIe, once forward and once backward; gradients back; the update on the host."""
    of = one_device(tmp_path, "80 GiB", "[parameters]")
    result = optimize(of, gap=0.0)
    assert result.plan.sharding == "parameters"
    away, costs = result.plan.scenario, AnalyticCostModel(result.plan.scenario)
    rate = away.cluster.pools[0].device.host_bytes_per_s
    assert rate is not None
    brought_s, taken_s = costs.sharding_s(Trained(dense=10**9), Trained(dense=10**9), Layout(sharding="parameters"))
    assert brought_s == pytest.approx(2e9 / rate)
    assert taken_s == pytest.approx(4e9 / rate)
    two = Layout(sharding="parameters", dp=2)
    assert costs.sharding_s(Trained(dense=10**9), Trained(), two)[0] > 1e9 / rate  # half each, then they gather
    assert optimizer_seconds(scenario_rules(away), away.optimizer, 1e9) == pytest.approx(0.257)


def test_weights_leave_the_device_where_states_alone_are_not_enough(tmp_path: Path) -> None:
    tight = one_device(tmp_path, "3.05 GiB", "[none, optimizer]")
    with pytest.raises(InfeasibleError, match=r"constraints\.offload \[parameters\] \(at least some \d.* per step"):
        optimize(tight)
    result = optimize(one_device(tmp_path, "3.05 GiB", "[none, optimizer, parameters]"))
    assert result.plan.scenario.technique.offload == "parameters"
    assert result.gap <= 0.01
    assert check_plan(result.plan) == ()
    free = optimize(one_device(tmp_path, "80 GiB", "[none, optimizer, parameters]"), gap=0.0)
    assert free.plan.scenario.technique.offload == "none"
    assert any("weights, gradients and optimizer state in host memory" in other.reason for other in free.runner_ups)


@pytest.mark.parametrize("memory", ["80 GiB", "3.3 GiB"])  # recomputation hides copies too
def test_no_bound_is_above_the_best_cut_with_weights_in_host_memory(tmp_path: Path, memory: str) -> None:
    of = one_device(tmp_path, memory, "[parameters]")
    pools = tuple(replace(pool, nodes=2) for pool in of.cluster.pools)
    free = replace(of.constraints, microbatch=(), recompute=())
    away = replace(of.technique, offload="parameters")
    job = replace(of, cluster=replace(of.cluster, pools=pools), constraints=free, technique=away)
    assert cuts_above_bounds(job) > 3


def test_weights_in_host_memory_need_them_sharded(tmp_path: Path) -> None:
    of = one_device(tmp_path, "80 GiB", "[parameters]")
    whole = replace(of, constraints=replace(of.constraints, sharding=("none", "optimizer")))
    with pytest.raises(InfeasibleError, match="need sharding: parameters, and this scenario has none, optimizer only"):
        optimize(whole)
