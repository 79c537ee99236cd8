"""Seconds of experts: the busiest rank sets the pace, and experts split over tp ranks are summed over them."""

from dataclasses import replace

import pytest
from small_models import LLM, Model, language_model, scenario_of

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.exposed_time import reduced_backward_elements, reduced_forward_elements
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.cost_models.shard import Shard
from mmplan.scenario.scenario import Moe, Scenario

LOAD = Load(sequences=1, tokens=10**6, pairs=10**9, input_elements=10**6)
MOE = Moe(experts=8, topk=2, expert_ffn=64)


def _scenario(moe: Moe | None) -> Scenario:
    return scenario_of(Model(name="m", modules=(language_model(replace(LLM, moe=moe)),), edges=()))


def _block(moe: Moe | None) -> Layer:
    return build_graph(_scenario(moe)).layer("llm.0")


def test_experts_take_as_long_as_the_busiest_rank() -> None:
    costs = AnalyticCostModel(_scenario(MOE))
    even, half_more, double = (
        costs.forward_s(_block(replace(MOE, imbalance=factor)), LOAD, 1) for factor in (1.0, 1.5, 2.0)
    )
    assert even < half_more < double
    assert double - even == pytest.approx(2 * (half_more - even))
    assert double < 2 * even


def test_more_experts_of_a_token_take_longer() -> None:
    costs = AnalyticCostModel(_scenario(MOE))
    assert costs.forward_s(_block(MOE), LOAD, 1) < costs.forward_s(_block(replace(MOE, topk=4)), LOAD, 1)


def test_the_sum_over_split_experts_is_one_all_reduce_each_way() -> None:
    rows = 10**6 * LLM.hidden
    for moe in (None, MOE):
        assert reduced_forward_elements(_block(moe), LOAD, Shard(tp=2)) == (rows, rows)  # attention, MLP or experts
        assert reduced_backward_elements(_block(moe), LOAD, Shard(tp=2)) == (rows, rows)
    shared = _block(replace(MOE, shared_ffn=32))
    assert reduced_forward_elements(shared, LOAD, Shard(tp=2)) == (rows, rows, rows)
    assert reduced_backward_elements(shared, LOAD, Shard(tp=2)) == (rows, rows)  # experts and shared ones read the same


def test_whole_experts_on_other_ranks_need_no_all_reduce() -> None:
    rows = 10**6 * LLM.hidden
    assert reduced_forward_elements(_block(MOE), LOAD, Shard(tp=2, ep=4, etp=1)) == (rows,)
    assert reduced_backward_elements(_block(MOE), LOAD, Shard(tp=2, ep=4, etp=1)) == (rows,)
