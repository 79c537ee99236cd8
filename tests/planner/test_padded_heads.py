"""tp that does not divide the heads: allowed by `constraints.pad_heads`, with its waste in every price."""

from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.collectives import Group, all_reduce_s
from mmplan.cost_models.layout import Layout, trained_on_rank
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.planned_memory import planned_kept_bytes, planned_state_bytes
from mmplan.cost_models.time_rules import pool_rules
from mmplan.errors import InfeasibleError
from mmplan.planner.check import check_plan
from mmplan.planner.pins import parse_pins
from mmplan.planner.repeated import Limits
from mmplan.planner.search import optimize
from mmplan.planner.why_not import why_not
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

SCENARIO = """
name: odd-heads
model:
  modules:
    llm: {kind: language_model, layers: 2, hidden: 96, heads: 6, kv_heads: 2, head_dim: 16, ffn: 256, vocabulary: 512}
data: {text_tokens: 4096}
batch: {global: 8}
precision: fp32
cluster: {device: cpu-core, nodes: 1, devices_per_node: 4}
constraints: {tp: 4, pp: 1, cp: 1, microbatch: 1, pad_heads: %s}
"""


def odd(tmp_path: Path, pad_heads: str) -> Scenario:
    path = tmp_path / f"{pad_heads}.yaml"
    path.write_text(SCENARIO % pad_heads)
    return load_scenario(path)


def test_without_padding_tp_4_of_6_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError, match=r"constraints\.tp allows 4, but only 1, 2 divide the heads"):
        optimize(odd(tmp_path, "false"))


def test_with_padding_it_is_planned_and_passes_the_checker(tmp_path: Path) -> None:
    plan = optimize(odd(tmp_path, "true")).plan
    assert plan.tp == 4
    assert check_plan(plan) == ()


def test_every_rank_pays_for_the_fullest_one(tmp_path: Path) -> None:
    """Of 6 heads over 4 ranks each holds 2, as if there were 8; of 2 key-value heads each holds one, whose gradients
    two ranks sum: of 2 products of 1 head, each a message between neighbours."""
    real = odd(tmp_path, "true")
    (module,) = real.model.modules
    assert module.transformer is not None
    eight = replace(module, transformer=replace(module.transformer, heads=8, kv_heads=4))
    padded = replace(real, model=replace(real.model, modules=(eight,)))
    layout, paid, backward = Layout(tp=4), [], []
    for scenario in (real, padded):
        layer, costs = build_graph(scenario).layer("llm.0"), AnalyticCostModel(scenario)
        load = mean_loads(scenario, 1)["llm"]
        backward.append(costs.backward_s(layer, load, layout))
        sizes = (planned_state_bytes(layer, scenario, layout), planned_kept_bytes(layer, load, scenario, layout))
        paid.append((costs.forward_s(layer, load, layout), *sizes, trained_on_rank(layer, layout).dense))
    assert paid[0] == pytest.approx(paid[1])
    (rules,), shape = pool_rules(real), module.transformer
    summed_s = all_reduce_s(shape.hidden * shape.head_dim * 4, Group(2, 2), rules.node_link, rules.network_link)
    assert backward[0] - backward[1] == pytest.approx(2 * rules.stack.exposed_tp_backward * summed_s)


def test_a_question_about_tp_names_the_way_out(tmp_path: Path) -> None:
    of = odd(tmp_path, "false")
    free = replace(of, constraints=replace(of.constraints, tp=()))
    winner = optimize(free, gap=0.0).plan
    reason = why_not(free, winner, parse_pins("tp=4", free), Limits(gap=0.0)).reason
    assert reason == "llm: heads 6 / tp 4 = 1.5 is no whole number; constraints.pad_heads fills heads up"


def test_padding_is_taken_only_where_it_is_worth_its_waste(tmp_path: Path) -> None:
    plain, padded = (
        replace(of, constraints=replace(of.constraints, tp=()))
        for of in (odd(tmp_path, "false"), odd(tmp_path, "true"))
    )
    without, with_padding = optimize(plain, gap=0.0).plan.certificate, optimize(padded, gap=0.0).plan.certificate
    assert with_padding.objective_s <= without.objective_s
