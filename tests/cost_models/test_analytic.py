"""Seconds by hand on a made-up device: 8 TFLOP/s bf16 at 0.5, 1 TB/s at 0.5, 1 us per operator."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import DEVICE, FROZEN, Model, language_model, scenario_of, vision_audio_model

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.layout import Layout, Trained, trained_on_rank
from mmplan.cost_models.load import Load
from mmplan.cost_models.time_rules import pool_rules, scenario_rules
from mmplan.errors import CostModelError
from mmplan.scenario.cluster import Pool

SCENARIO = scenario_of(Model(name="m", modules=(language_model(),), edges=()))
GRAPH = build_graph(SCENARIO)
COSTS: CostModel = AnalyticCostModel(SCENARIO)
LOAD = Load(sequences=1, tokens=10**6, pairs=10**9, input_elements=10**6)


def test_head_takes_its_flops_over_the_reached_rate() -> None:
    """2 * 1e6 * 64 * 256 FLOP at 4 TFLOP/s is 8.19 ms; its bytes (64 + 256) * 1e6 * 2 at 0.5 TB/s are 1.28 ms."""
    assert COSTS.forward_s(GRAPH.layer("llm.head"), LOAD, 1) == pytest.approx(2 * 1e6 * 64 * 256 / 4e12)


def test_weight_gradient_adds_reading_and_writing_its_accumulator() -> None:
    head = GRAPH.layer("llm.head")
    accumulate_s = 2 * 4 * 64 * 256 / 0.5e12
    assert COSTS.wgrad_s(head, LOAD, 1) == pytest.approx(2 * 1e6 * 64 * 256 / 4e12 + accumulate_s)


def test_loss_takes_its_bytes_over_the_reached_bandwidth() -> None:
    """The plain loss reads logits in 2 bytes, writes, reads and writes fp32: 12 bytes per logit, fused in part."""
    assert COSTS.forward_s(GRAPH.layer("llm.loss"), LOAD, 1) == pytest.approx(1e6 * 256 * 12 / 0.5e12)


def test_every_operator_takes_at_least_its_launch() -> None:
    tiny = Load(sequences=1, tokens=1, pairs=1, input_elements=1)
    layer = GRAPH.layer("llm.0")
    assert COSTS.forward_s(layer, tiny, 1) == pytest.approx(len(layer.ops) * 1e-6)


def test_no_tokens_take_no_time() -> None:
    for layer in GRAPH.layers():
        assert COSTS.forward_s(layer, Load(), 2) == COSTS.backward_s(layer, Load(), 2) == 0.0


def test_frozen_model_has_no_backward_time() -> None:
    frozen = build_graph(scenario_of(Model(name="m", modules=(language_model(training=FROZEN),), edges=())))
    assert all(COSTS.backward_s(layer, LOAD, 2) == 0.0 for layer in frozen.layers())


def test_transfer_is_latency_plus_bytes_over_the_reached_bandwidth() -> None:
    assert COSTS.transfer_s(5e9, True) == pytest.approx(2e-6 + 0.1)
    assert COSTS.transfer_s(5e9, False) == pytest.approx(10e-6 + 1.0)
    assert COSTS.transfer_s(0, False) == 0.0


def reduce_s(size_bytes: float, ranks: int) -> float:
    """All-reduce of fp32 gradients over ranks of which 8 share a node."""
    return COSTS.reduce_s(Trained(dense=round(size_bytes / 4)), Layout(dp=ranks), 8)


def test_all_reduce_in_a_node_moves_two_times_p_minus_1_over_p() -> None:
    assert reduce_s(50e9, 4) == pytest.approx(2 * 3 * 2e-6 + 2 * 3 / 4 * 1.0)


def test_all_reduce_across_nodes_shares_the_network_among_the_ranks_of_a_node() -> None:
    """16 ranks, 8 a node: 2 * 7/8 of the bytes inside, 2 * 1/2 of an eighth of them across."""
    inside_s = 2 * 7 * 2e-6 + 2 * 7 / 8 * 1.0
    across_s = 2 * 10e-6 + 2 * 1 / 2 * 50e9 / 8 / 5e9
    assert reduce_s(50e9, 16) == pytest.approx(inside_s + across_s)
    assert reduce_s(50e9, 1) == reduce_s(0, 4) == 0.0


def test_a_sharded_optimizer_scatters_gradients_gathers_weights_and_updates_its_share() -> None:
    """fp32 gradients one way, bf16 weights the other: three quarters of an all-reduce, for a quarter of the update."""
    trained, ranks = Trained(dense=10**9), Layout(dp=4, sharding="optimizer")
    whole = reduce_s(4e9, 4)
    assert COSTS.reduce_s(trained, ranks, 8) == pytest.approx(0.75 * whole, rel=1e-3)
    assert COSTS.update_s(trained, ranks) == pytest.approx(COSTS.update_s(trained, Layout()) / 4)
    assert COSTS.sharding_s(trained, trained, ranks) == (0.0, 0.0)


def test_sharded_parameters_are_gathered_and_gradients_scattered_every_microbatch() -> None:
    layer, load, ranks = GRAPH.layer("llm.1"), LOAD, Layout(dp=4, sharding="parameters")
    held = trained_on_rank(layer, ranks)
    gather, scatter = COSTS.sharding_s(held, held, ranks)
    assert scatter == pytest.approx(2 * gather, rel=0.5)  # fp32 and bf16, and latency
    forward = COSTS.forward_s(layer, load, Layout(dp=4))
    assert COSTS.forward_s(layer, load, ranks) >= max(forward, gather)
    assert COSTS.reduce_s(held, ranks, 8) == 0.0


def test_experts_are_reduced_over_the_ranks_that_hold_the_same_ones() -> None:
    """16 ranks in 2 x 8, experts spread over 8: two ranks hold each set, and all 16 the rest."""
    ranks = Layout(dp=16, ep=8)
    assert ranks.expert_replicas == 2
    both = COSTS.reduce_s(Trained(dense=10**6, experts=10**9), ranks, 8)
    across_s = 2 * 10e-6 + 2 * 1 / 2 * 4e9 / 5e9
    assert both == pytest.approx(reduce_s(4e6, 16) + across_s)


def test_tensor_parallel_block_pays_two_all_reduces_each_way() -> None:
    """Compute halves apart from the replicated norms and residuals; each all-reduce is [tokens, 64] in bf16."""
    layer, load = GRAPH.layer("llm.1"), LOAD
    reduces = 2 * reduce_s(load.tokens * 64 * 2, 2)
    for seconds in (COSTS.forward_s, COSTS.dgrad_s):
        assert seconds(layer, load, 1) / 2 + reduces < seconds(layer, load, 2) < seconds(layer, load, 1) + reduces


def test_optimizer_moves_34_bytes_per_parameter_of_mixed_precision_adamw() -> None:
    """fp32 gradient read and cleared (8), two moments (16) and master (8) read and written, bf16 weight written (2)."""
    assert COSTS.update_s(Trained(dense=10**9), Layout()) == pytest.approx(34 * 1e9 / 0.85e12)
    assert COSTS.update_s(Trained(), Layout()) == 0.0


@given(tokens=st.integers(1, 10**6), more=st.integers(0, 10**6))
def test_more_tokens_never_take_less_time(tokens: int, more: int) -> None:
    first, second = (Load(sequences=1, tokens=n, pairs=n, input_elements=n) for n in (tokens, tokens + more))
    for layer in GRAPH.layers():
        assert COSTS.forward_s(layer, first, 1) <= COSTS.forward_s(layer, second, 1)
        assert COSTS.backward_s(layer, first, 1) <= COSTS.backward_s(layer, second, 1)


def test_device_without_bf16_units_is_refused_with_what_to_set() -> None:
    volta = replace(DEVICE, name="v100", bf16_flops_per_s=None)
    with pytest.raises(CostModelError, match="v100 has no bf16 matrix units; set precision to fp16 or fp32"):
        AnalyticCostModel(scenario_of(vision_audio_model(), device=volta))


def test_mixed_devices_have_no_single_set_of_rules() -> None:
    pool = SCENARIO.cluster.pools[0]
    other = Pool(device=replace(DEVICE, name="other"), nodes=1, devices_per_node=8, node_link=pool.node_link)
    mixed = replace(SCENARIO, cluster=replace(SCENARIO.cluster, pools=(pool, other)))
    with pytest.raises(CostModelError, match="the cluster mixes other and toy"):
        scenario_rules(mixed)
    assert [rules.device.name for rules in pool_rules(mixed)] == ["toy", "other"]
