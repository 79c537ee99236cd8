"""Compressed gradients as an axis of the search: chosen where faster, outside zones, with bytes to the last one."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.compressed_bytes import MEASURED_ERRORS, TOP_K_SIGN
from mmplan.cost_models.layout import trained_on_rank
from mmplan.planner.check import check_plan
from mmplan.planner.compression_price import compression_price
from mmplan.planner.formats.needs import plan_needs
from mmplan.planner.plan import Plan, scenario_hash
from mmplan.planner.search import optimize
from mmplan.planner.simulate import simulate
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

SCENARIO = """
name: two-nodes
model:
  modules:
    vision: {kind: vision_encoder, layers: 2, hidden: 64, heads: 4, ffn: 256, patch: 8, image_size: 64}
    projector: {kind: projector, dims: [256, 128], merge: 4}
    llm: {kind: language_model, layers: 4, hidden: 128, heads: 4, kv_heads: 2, ffn: 384, vocabulary: 512}
  edges: [[vision, projector], [projector, llm]]
data: {text_tokens: [48, 64], images: 1}
batch: {global: 8}
precision: fp32
cluster: {device: cpu-core, nodes: 4, devices_per_node: 1, network: {bandwidth: %s, latency: 10 us}}
constraints: {tp: 1, %s}
"""
SLOW, FAST = "10 MB/s", "100 GB/s"


def job(folder: Path, constraints: str, bandwidth: str = SLOW) -> Scenario:
    path = folder / "job.yaml"
    path.write_text(SCENARIO % (bandwidth, constraints))
    return load_scenario(path)


def plan_of(folder: Path, constraints: str, bandwidth: str = SLOW) -> Plan:
    return optimize(job(folder, constraints, bandwidth), gap=0.0).plan


def test_it_is_chosen_where_the_network_is_slow_and_asked_for(tmp_path: Path) -> None:
    asked = "dp: 4, sharding: none, compression: [topk, fp8]"
    slow, fast = plan_of(tmp_path, asked), plan_of(tmp_path, asked, FAST)
    unasked = plan_of(tmp_path, "dp: 4, sharding: none")
    assert slow.scenario.technique.compression == "topk" and slow.certificate.status == "optimal"
    assert fast.scenario.technique.compression == "none"
    assert unasked.scenario.technique.compression == "none"
    assert slow.certificate.objective_s < unasked.certificate.objective_s
    assert check_plan(slow) == () and check_plan(fast) == ()


def test_a_scenario_that_does_not_ask_keeps_its_hash() -> None:
    scenario = load_scenario(Path(__file__).parents[2] / "scenarios" / "tiny.yaml")
    assert scenario_hash(scenario) == "430fdec411ef7d47"  # of plans made before there was compression


def test_a_rank_sends_a_message_for_each_layer_and_whole_gradients_of_zones(tmp_path: Path) -> None:
    zones = "no_split: [llm.0-1, llm.embed], forbid: [compression]"
    plan = plan_of(tmp_path, f"pp: 1, dp: 4, sharding: none, compression: topk, {zones}")
    assert plan.scenario.technique.compression == "topk"
    trained = {x.id: trained_on_rank(x, plan.layout(0)).dense for x in build_graph(plan.scenario).layers()}
    whole = [4 * trained.pop(name) for name in ("llm.0", "llm.1", "llm.embed")]
    expected = sum(whole) + sum(map(TOP_K_SIGN.wire_bytes, trained.values()))
    prediction = simulate(plan, build_graph(plan.scenario), AnalyticCostModel(plan.scenario))
    assert {rank.reduce_bytes for rank in prediction.ranks} == {expected}
    # 4 bytes of what is not said yet for each element that may be left out
    unasked = plan_of(tmp_path, "pp: 1, dp: 4, sharding: none, microbatch: " + str(plan.microbatch_size))
    more = plan.stages[0].memory_bytes - unasked.stages[0].memory_bytes
    assert more == 4 * sum(count for count in trained.values() if count >= 1024)


@pytest.mark.parametrize("zones", ["", "no_split: [llm.1-2], forbid: [compression]"])
@pytest.mark.parametrize("bandwidth", [SLOW, "300 MB/s"])
def test_no_pinned_plan_is_below_the_bound(zones: str, bandwidth: str, tmp_path: Path) -> None:
    asked = f"compression: [topk, fp8], schedule: 1f1b, {zones}"
    found = optimize(job(tmp_path, asked, bandwidth), gap=0.0)
    assert found.bound_s <= found.plan.certificate.objective_s
    for pp, dp, sharding in ((1, 4, "none"), (2, 2, "none"), (4, 1, "none"), (1, 4, "optimizer")):
        pinned = plan_of(tmp_path, f"pp: {pp}, dp: {dp}, sharding: {sharding}, {asked}", bandwidth)
        assert pinned.certificate.objective_s >= found.bound_s * (1 - 1e-9)
        assert check_plan(pinned) == ()


def test_a_plan_that_compresses_unasked_is_found_out(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "dp: 4, sharding: none")
    scenario = replace(plan.scenario, technique=replace(plan.scenario.technique, compression="fp8"))
    findings = check_plan(replace(plan, scenario=scenario, scenario_hash=scenario_hash(scenario)))
    assert any(f.message == "compression is fp8, constraints.compression allows none" for f in findings)


def test_numbers_of_a_plan_are_those_of_its_compression(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "dp: 4, sharding: none, compression: [topk, fp8]")
    scenario = replace(plan.scenario, technique=replace(plan.scenario.technique, compression="fp8"))
    rules = {f.rule for f in check_plan(replace(plan, scenario=scenario, scenario_hash=scenario_hash(scenario)))}
    assert "stage times" in rules


def test_what_it_saves_and_its_error_are_said(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "pp: 1, dp: 4, sharding: none, compression: topk")
    saving, error = compression_price(plan)
    assert "it ended with +0.43 ± 0.11 of loss and -14.5 ± 4.6 points of top-1 accuracy" in error
    assert saving.startswith("compression: topk saves ") and " instead of " in saving
    assert "at least 5% of the squared norm before rounding; the rest is said later, 20 steps on average" in error
    assert compression_price(plan_of(tmp_path, "dp: 4")) == ()
    needs = plan_needs(plan, build_graph(plan.scenario))
    assert "compressed gradients" in [need.name for need in needs]


def test_gradients_that_travel_whole_are_told_with_why(tmp_path: Path) -> None:
    zones = "no_split: [llm.0-1], forbid: [compression]"
    *_, whole = compression_price(plan_of(tmp_path, f"pp: 1, dp: 4, sharding: none, compression: topk, {zones}"))
    assert whole.startswith("gradients that travel whole: ") and whole.endswith(" of layers in zones")
    plan = plan_of(tmp_path, "pp: 1, dp: 4, sharding: none, compression: topk")
    (sharded,) = compression_price(replace(plan, sharding="optimizer"))
    assert "sharding=optimizer sums shares of them" in sharded
    wide = replace(plan, dp=2, tp=2, spread=("vision", "projector"))
    *_, whole = compression_price(wide)
    assert " of spread modules, " in whole and " of parameters that all tp ranks hold alike" in whole


def test_the_measured_error_is_that_of_the_benchmark() -> None:
    with (Path(__file__).parents[2] / "benchmarks" / "compression.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    for compression, method in (("topk", "top 5 %, sign and 4 bits"), ("fp8", "top 20 %, fp8")):
        row, told = rows[method], MEASURED_ERRORS[compression]
        assert (told.loss, told.loss_half_width) == (float(row["loss_difference"]), float(row["loss_half_width"]))
        assert (told.top1_points, told.top1_half_width) == (
            float(row["top1_difference"]),
            float(row["top1_half_width"]),
        )
