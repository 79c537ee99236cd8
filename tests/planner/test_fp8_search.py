"""Products in FP8 where constraints allow them, but not in zones that forbid them."""

from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.planned_memory import planned_kept_bytes, planned_state_bytes
from mmplan.errors import InputError
from mmplan.planner.check import check_plan
from mmplan.planner.formats.megatron import export_megatron
from mmplan.planner.result import OptimizeResult
from mmplan.planner.search import optimize
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

JOB = """name: job
model:
  modules:
    llm: {kind: language_model, layers: 8, hidden: 4096, heads: 32, ffn: 14336, vocabulary: 32000}
data: {text_tokens: 4096}
batch: {global: 16}
precision: bf16
cluster: {device: %s, nodes: 1, devices_per_node: 8}
constraints: {tp: 1, cp: 1, %s}
"""


def job(folder: Path, constraints: str, device: str = "h100-sxm") -> Scenario:
    file = folder / "job.yaml"
    file.write_text(JOB % (device, constraints))
    return load_scenario(file)


def solved(folder: Path, constraints: str) -> OptimizeResult:
    result = optimize(job(folder, constraints))
    assert check_plan(result.plan) == ()
    return result


def test_fp8_is_taken_where_it_is_allowed_and_faster(tmp_path: Path) -> None:
    plain, free = solved(tmp_path, "pp: 2"), solved(tmp_path, "pp: 2, fp8: [none, block]")
    assert (plain.plan.scenario.technique.fp8, free.plan.scenario.technique.fp8) == ("none", "block")
    assert free.plan.certificate.objective_s < 0.9 * plain.plan.certificate.objective_s
    assert any(runner.reason.startswith("with no FP8: ") for runner in free.runner_ups)
    assert free.plan.certificate.objective_s * (1 - free.gap) >= free.bound_s * (1 - 1e-9)


def test_a_zone_keeps_its_blocks_out_of_fp8(tmp_path: Path) -> None:
    part = solved(tmp_path, "pp: 2, fp8: [none, block], no_split: [llm.0-2], forbid: [fp8]")
    free, plain = solved(tmp_path, "pp: 2, fp8: [none, block], no_split: [llm.0-2]"), solved(tmp_path, "pp: 2")
    objectives = [result.plan.certificate.objective_s for result in (free, part, plain)]
    assert objectives == sorted(objectives) and len(set(objectives)) == 3
    scenario = part.plan.scenario
    graph, costs, load = build_graph(scenario), AnalyticCostModel(scenario), mean_loads(scenario, 1)["llm"]
    inside, outside = graph.layer("llm.1"), graph.layer("llm.5")
    assert (inside.no_fp8, outside.no_fp8) == (True, False)
    assert costs.forward_s(inside, load, Layout()) > costs.forward_s(outside, load, Layout())
    assert planned_kept_bytes(inside, load, scenario) > planned_kept_bytes(outside, load, scenario)
    assert planned_state_bytes(inside, scenario) < planned_state_bytes(outside, scenario)  # no copies in FP8
    (loss,) = [loss.sentence for loss in export_megatron(part.plan).losses if "FP8" in loss.sentence]
    assert "those of 'llm.0-2', kept out of it here" in loss


def test_devices_without_fp8_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"constraints\.fp8: a100-sxm-80 has no FP8 units, and 'mx' is allowed"):
        job(tmp_path, "fp8: [mx]", "a100-sxm-80")
    assert job(tmp_path, "fp8: [none, mx]", "a100-sxm-80").constraints.fp8 == ("none",)
    plain = job(tmp_path, "pp: 2")
    assert plain.constraints == replace(plain.constraints, fp8=("none",))
