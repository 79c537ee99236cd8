"""Properties of FLOPs and bytes, and memory by hand; `tests/runtime/test_layers.py` compares them with torch."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import FROZEN, LLM, Model, language_model, scenario_of, vision_audio_model

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import (
    dgrad_flops,
    edge_bytes,
    forward_flops,
    kept_bytes,
    op_parameters,
    parameters,
    wgrad_flops,
)
from mmplan.cost_models.degrees import tp_degrees
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.cost_models.memory import state_bytes, trained_parameter_bytes
from mmplan.scenario.scenario import Dtype, Optimizer

GRAPH = build_graph(scenario_of(vision_audio_model()))
TEXT = build_graph(scenario_of(Model(name="m", modules=(language_model(),), edges=())))
LOADS = st.builds(Load, *(st.integers(0, 10**6) for _ in range(9)))
LAYERS = st.sampled_from(GRAPH.layers())


@given(layer=LAYERS, first=LOADS, second=LOADS, factor=st.integers(0, 7))
def test_flops_are_linear_in_the_load(layer: Layer, first: Load, second: Load, factor: int) -> None:
    for flops in (forward_flops, dgrad_flops, wgrad_flops):
        mixed = flops(layer, first + second.scaled(factor))
        assert mixed == pytest.approx(flops(layer, first) + factor * flops(layer, second), rel=1e-12)


@given(layer=LAYERS, load=LOADS)
def test_more_tensor_parallel_ranks_never_raise_flops_or_bytes_per_rank(layer: Layer, load: Load) -> None:
    for smaller, larger in ((1, 2), (2, 4)):
        for flops in (forward_flops, dgrad_flops, wgrad_flops):
            assert flops(layer, load, larger) <= flops(layer, load, smaller)
        assert kept_bytes(layer, load, "bf16", larger) <= kept_bytes(layer, load, "bf16", smaller)
        assert state_bytes(layer, "bf16", Optimizer(), larger) <= state_bytes(layer, "bf16", Optimizer(), smaller)


def test_tensor_parallel_splits_weights_but_not_norms() -> None:
    layer = TEXT.layer("llm.0")
    norms = 2 * 64
    assert sum(op_parameters(op, 2) for op in layer.ops) == (parameters(layer) - norms) // 2 + norms


def test_tensor_parallel_splits_inner_activations_but_not_block_inputs() -> None:
    """bf16 block, T rows: 4 replicated [T, 64] (two norm inputs and outputs) and 2 fp32 statistics per row; q and
    output 64 wide, k and v 32, with 4 log-sum-exps; gate, up, active, product 128."""
    layer, load, rows = TEXT.layer("llm.0"), Load(tokens=10, pairs=100), 10
    whole = rows * (2 * 4 * 64 + 4 * 2)
    split = rows * (2 * (64 + 64 + 32 + 32 + 4 * 128) + 4 * 4)
    assert kept_bytes(layer, load, "bf16") == whole + split
    assert kept_bytes(layer, load, "bf16", 2) == whole + split // 2


@pytest.mark.parametrize(
    ("precision", "optimizer", "expected"),
    [
        ("bf16", Optimizer(), 2 + 4 + 4 + 8),
        ("bf16", Optimizer(gradient_dtype="bf16"), 2 + 2 + 4 + 8),
        ("fp32", Optimizer(), 4 + 4 + 8),
        ("fp32", Optimizer(name="sgd"), 4 + 4),
    ],
)
def test_bytes_per_trained_parameter(precision: Dtype, optimizer: Optimizer, expected: int) -> None:
    assert trained_parameter_bytes(precision, optimizer) == expected
    layer = TEXT.layer("llm.0")
    assert state_bytes(layer, precision, optimizer) == expected * parameters(layer)


def test_frozen_layer_costs_its_weights_alone() -> None:
    module = language_model(training=FROZEN)
    graph = build_graph(scenario_of(Model(name="m", modules=(module,), edges=())))
    assert state_bytes(graph.layer("llm.0"), "bf16", Optimizer()) == 2 * parameters(graph.layer("llm.0"))
    assert kept_bytes(graph.layer("llm.0"), Load(tokens=10, pairs=100), "bf16") == 0


def test_edge_bytes_are_width_times_tokens_times_dtype() -> None:
    loads = {"vision": Load(tokens=17, outputs=16)}
    assert edge_bytes(GRAPH.edge("vision.0", "vision.1"), loads, "bf16") == 32 * 17 * 2
    assert edge_bytes(GRAPH.edge("vision.1", "projector.0"), loads, "fp32") == 32 * 16 * 4


def test_tp_degrees_divide_heads_ffn_vocabulary_and_node() -> None:
    assert tp_degrees(scenario_of(vision_audio_model())) == (1, 2)
    odd = language_model(replace(LLM, kv_heads=1))
    assert tp_degrees(scenario_of(Model(name="m", modules=(odd,), edges=()))) == (1,)
    eight = language_model(replace(LLM, heads=8, kv_heads=8))
    assert tp_degrees(scenario_of(Model(name="m", modules=(eight,), edges=()))) == (1, 2, 4, 8)
