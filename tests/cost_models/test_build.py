"""The graph of a scenario: its layers, order, edges and where gradients flow."""

from dataclasses import replace

import pytest
from small_models import (
    FROZEN,
    LLAMA_8B,
    LLM,
    edge,
    language_model,
    projector,
    scenario_of,
    vision,
    vision_audio_model,
)

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import forward_flops, parameters, trainable_parameters
from mmplan.cost_models.graph import ComputationGraph, Edge
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.errors import CostModelError
from mmplan.scenario.scenario import Model, Training


def _llama(tied: bool = False) -> ComputationGraph:
    module = language_model(LLAMA_8B, vocabulary=128256, tied=tied)
    return build_graph(scenario_of(Model(name="llama", modules=(module,), edges=())))


def _input_grad(layer: Layer) -> bool:
    """Some input carries a gradient: a trainable layer lies upstream."""
    return any(source.value in layer.grad_values for source in layer.sources)


def test_llama_3_8b_has_its_published_parameters() -> None:
    """8,030,261,248: the safetensors total of meta-llama/Meta-Llama-3-8B, table and head untied."""
    assert sum(parameters(layer) for layer in _llama().layers()) == 8_030_261_248


def test_tied_head_counts_no_parameters_of_its_own() -> None:
    total = sum(parameters(layer) for layer in _llama(tied=True).layers())
    assert total == 8_030_261_248 - 128256 * 4096


def test_llama_8b_layer_at_4096_tokens_is_2_06_teraflop() -> None:
    """2 * 4096 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336) + 4 * 4096^2 * 4096 = 2.0616e12."""
    linears = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336
    flops = forward_flops(_llama().layer("llm.0"), Load(tokens=4096, pairs=4096**2))
    assert flops == 2 * 4096 * linears + 4 * 4096**2 * 4096
    assert flops == pytest.approx(2.0616e12, rel=1e-4)


def test_layers_come_in_topological_order_with_modules_in_file_order() -> None:
    graph = build_graph(scenario_of(vision_audio_model()))
    ids = [layer.id for layer in graph.layers()]
    assert ids == [
        *("vision.embed", "vision.0", "vision.1", "projector.0"),
        *("audio.embed", "audio.0", "audio.1", "audio_projector.0"),
        *("llm.embed", "llm.0", "llm.1", "llm.head", "llm.loss"),
    ]
    assert graph.predecessors("llm.embed") == ("projector.0", "audio_projector.0")
    assert graph.successors("vision.1") == ("projector.0",)


def test_only_the_edge_from_head_to_loss_is_uncuttable() -> None:
    graph = build_graph(scenario_of(vision_audio_model()))
    assert [edge.name for edge in graph.edges() if not edge.cuttable] == ["llm.head>llm.loss"]


def test_frozen_encoder_has_no_backward_and_sends_no_gradient() -> None:
    graph = build_graph(scenario_of(vision_audio_model(FROZEN)))
    for layer in ("vision.embed", "vision.0", "vision.1"):
        assert not graph.layer(layer).has_backward
    assert graph.layer("projector.0").has_backward and not _input_grad(graph.layer("projector.0"))
    assert not graph.edge("vision.1", "projector.0").carries_grad
    assert graph.edge("projector.0", "llm.embed").carries_grad


def test_frozen_projector_behind_a_trained_encoder_passes_gradients() -> None:
    graph = build_graph(scenario_of(vision_audio_model(None, FROZEN)))
    layer = graph.layer("projector.0")
    assert _input_grad(layer) and layer.has_backward and not layer.trainable
    assert graph.edge("vision.1", "projector.0").carries_grad


def test_frozen_token_table_has_no_backward_unless_merged_tokens_carry_gradients() -> None:
    module = language_model(training=FROZEN)
    alone = build_graph(scenario_of(Model(name="m", modules=(module,), edges=())))
    assert not any(layer.has_backward for layer in alone.layers())
    modules, edges = (vision(), projector("p"), module), (edge("vision", "p", "input"), edge("p", "llm"))
    merged = build_graph(scenario_of(Model(name="m", modules=modules, edges=edges)))
    assert _input_grad(merged.layer("llm.embed")) and not merged.layer("llm.embed").trainable


def test_lora_trains_rank_times_the_sum_of_both_widths() -> None:
    training = Training(mode="lora", rank=4, targets=("q", "down"))
    graph = build_graph(scenario_of(Model(name="m", modules=(language_model(training=training),), edges=())))
    assert trainable_parameters(graph.layer("llm.0")) == 4 * (64 + 64) + 4 * (128 + 64)
    assert not graph.layer("llm.embed").trainable
    assert not _input_grad(graph.layer("llm.0")) and _input_grad(graph.layer("llm.1"))


def test_cross_attention_feeds_every_cross_layer() -> None:
    shape = replace(LLM, layers=4, cross_layers=(1, 3))
    modules = (vision(FROZEN), projector("p"), language_model(shape))
    edges = (edge("vision", "p", "input"), edge("p", "llm", "cross_attention"))
    graph = build_graph(scenario_of(Model(name="m", modules=modules, edges=edges)))
    assert graph.successors("p.0") == ("llm.1", "llm.3")
    assert [layer.kind for layer in graph.layers() if layer.module == "llm"][1:5] == [
        *("block", "cross_block", "block", "cross_block")
    ]
    assert graph.edge("p.0", "llm.3").load_field == "outputs"


def test_widths_that_do_not_match_are_named_with_both_layers() -> None:
    modules, edges = (vision(), language_model()), (edge("vision", "llm"),)
    with pytest.raises(CostModelError, match=r"vision\.1 hands on tokens of width 32, llm\.embed reads width 64"):
        build_graph(scenario_of(Model(name="m", modules=modules, edges=edges)))


def test_modules_are_built_upstream_first_and_kept_in_file_order() -> None:
    forward = vision_audio_model()
    backward = replace(forward, modules=tuple(reversed(forward.modules)))
    graph, turned = build_graph(scenario_of(forward)), build_graph(scenario_of(backward))
    assert {layer.id: layer for layer in turned.layers()} == {layer.id: layer for layer in graph.layers()}
    assert turned.layers()[0].module == "audio"
    assert graph.layers()[0].module == "vision"


def test_modules_in_a_circle_are_refused() -> None:
    modules = (projector("p"), projector("q"))
    edges = (edge("p", "q", "input"), edge("q", "p", "input"))
    with pytest.raises(CostModelError, match="modules feed each other in a circle: p, q"):
        build_graph(scenario_of(Model(name="m", modules=modules, edges=edges)))


def test_a_module_is_a_projector_or_has_blocks() -> None:
    with pytest.raises(ValueError, match="'p' is a projector, has transformer blocks or was recorded"):
        replace(projector("p"), transformer=LLM)


def test_graph_refuses_cycles_and_unknown_layers() -> None:
    layers = build_graph(scenario_of(vision_audio_model())).layers()[:2]

    def link(producer: str, consumer: str) -> Edge:
        return Edge(
            producer=producer, consumer=consumer, width=1, load_module="m", load_field="tokens", carries_grad=False
        )

    with pytest.raises(ValueError, match="unknown layer"):
        ComputationGraph(layers, [link("vision.embed", "nowhere")])
    with pytest.raises(ValueError, match="cycle"):
        ComputationGraph(layers, [link("vision.embed", "vision.0"), link("vision.0", "vision.embed")])
