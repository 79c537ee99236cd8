"""How the ranks of a stage share layers: rows, weights, states, and what is recomputed."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
from small_models import scenario_of, vision_audio_model

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.layout import RECOMPUTE_LEVELS, Layout, Trained, base_of, trained_on_rank
from mmplan.cost_models.load import Load
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.planned_memory import (
    loss_working_bytes,
    planned_kept_bytes,
    planned_state_bytes,
    planned_working_bytes,
)
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.values import rows_of_context_rank

SCENARIO = scenario_of(vision_audio_model())
GRAPH = build_graph(SCENARIO)
LOADS = mean_loads(SCENARIO, 8)
VISION, TEXT = GRAPH.layer("vision.0"), GRAPH.layer("llm.0")


def test_only_language_models_split_rows() -> None:
    ranks = Layout(tp=2, cp=4)
    assert ranks.shard(TEXT) == Shard(tp=2, cp=4)
    assert ranks.shard(VISION) == Shard(tp=2)
    assert replace(ranks, spread=("vision",)).shard(VISION) == Shard()


@pytest.mark.parametrize(("images", "ranks", "share"), [(8, 4, 2), (9, 4, 3), (3, 4, 1), (0.5, 4, 0.5), (0, 4, 0)])
def test_a_rank_of_a_spread_module_takes_whole_images(images: float, ranks: int, share: float) -> None:
    """9 images on 4 ranks: the busiest has 3; half an image on average is one rank's."""
    load = Load(sequences=images, tokens=100 * images)
    found = Layout(tp=2, cp=ranks // 2, spread=("vision",)).load(VISION, load)
    assert (found.sequences, found.tokens) == (pytest.approx(share), pytest.approx(100 * share))
    assert Layout(tp=2, cp=2).load(VISION, load) == load


def test_levels_of_recomputation_grow_block_by_block() -> None:
    blocks = [replace(TEXT, index=index) for index in range(8)]
    dropped = {level: [Layout(recompute=level).recomputed(b) == "full" for b in blocks] for level in RECOMPUTE_LEVELS}
    assert [sum(dropped[level]) for level in RECOMPUTE_LEVELS] == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    parts = [dropped[level] for level in RECOMPUTE_LEVELS[2:]]
    assert all(a <= b for less, more in pairwise(parts) for a, b in zip(less, more, strict=True))
    for first, count in product(range(8), range(1, 9)):  # any number of up to eight blocks in a row
        taken = [[dropped[level][(first + block) % 8] for block in range(count)] for level in RECOMPUTE_LEVELS[1:]]
        assert {sum(of) for of in taken} == set(range(count + 1))
    assert Layout(recompute="full").recomputed(GRAPH.layer("llm.head")) == "none"
    assert [base_of(level) for level in RECOMPUTE_LEVELS] == ["none", "selective", *["full"] * 8]


def test_a_recomputed_block_keeps_less_takes_a_forward_longer_and_needs_its_activations_at_work() -> None:
    costs, load = AnalyticCostModel(SCENARIO), LOADS["llm"]
    plain, full = Layout(), Layout(recompute="full")
    kept, less = (planned_kept_bytes(TEXT, load, SCENARIO, ranks) for ranks in (plain, full))
    assert less < kept
    at_work = planned_working_bytes([TEXT], LOADS, SCENARIO, plain)
    assert at_work > 0
    assert planned_working_bytes([TEXT], LOADS, SCENARIO, full) == at_work + kept - less
    again_s = costs.backward_s(TEXT, load, full) - costs.backward_s(TEXT, load, plain)
    assert again_s == pytest.approx(costs.forward_s(TEXT, load, plain))


@pytest.mark.parametrize(("sharding", "left"), [("none", 16), ("optimizer", 4 + 4 + 2), ("parameters", 4)])
def test_zero_splits_states_over_the_replicas(sharding: str, left: int) -> None:
    """fp32 AdamW: weights 4, gradients 4, moments 8 bytes of each parameter; over 4 replicas."""
    ranks = Layout(dp=2, cp=2, sharding=sharding)  # type: ignore[arg-type]
    count = trained_on_rank(TEXT, ranks).total
    of = replace(SCENARIO, precision="fp32")
    assert planned_state_bytes(TEXT, of, ranks) == pytest.approx(left * count, abs=8)


def test_gathered_weights_of_two_layers_stand_beside_shards() -> None:
    ranks = Layout(dp=4, sharding="parameters")
    count = trained_on_rank(TEXT, ranks).total
    size = {"fp32": 4, "bf16": 2}[SCENARIO.precision]
    plain = planned_working_bytes([TEXT], LOADS, SCENARIO, Layout())
    assert planned_working_bytes([TEXT], LOADS, SCENARIO, ranks) == plain + 3 * count * size


def test_the_stage_of_a_loss_has_room_for_its_logits_at_work() -> None:
    """fp32 log-probabilities are kept; at work the stack holds more (`MemoryRules.logit_bytes`)."""
    loss, load = GRAPH.layer("llm.loss"), LOADS["llm"]
    alone = loss_working_bytes(loss, load, SCENARIO, Layout(), 0)
    assert alone > 0
    assert loss_working_bytes(loss, load, SCENARIO, Layout(), alone - 10) == 10
    assert loss_working_bytes(loss, load, SCENARIO, Layout(), alone + 10) == 0
    assert loss_working_bytes(TEXT, load, SCENARIO, Layout(), 0) == 0
    assert planned_working_bytes([loss], LOADS, SCENARIO, Layout()) == 0


def test_parameters_by_the_ranks_that_hold_them() -> None:
    assert trained_on_rank(VISION, Layout(tp=2, spread=("vision",))).spread == trained_on_rank(VISION, Layout()).dense
    assert trained_on_rank(VISION, Layout(tp=2)).dense < trained_on_rank(VISION, Layout()).dense
    assert Trained(1, 2, 3) + Trained(1, 1, 1) == Trained(2, 3, 4)
    assert Trained(1, 2, 3).times(2).total == 12


def test_the_outputs_of_a_spread_encoder_are_gathered_where_they_leave_it() -> None:
    assert {layer.id for layer in GRAPH.layers() if "llm" in layer.readers} == {"projector.0", "audio_projector.0"}
    costs, projector = AnalyticCostModel(SCENARIO), GRAPH.layer("projector.0")
    load = LOADS["projector"]
    for cp, summed in ((1, False), (2, True)):  # the gradient is the same on all tp ranks, and a sum over cp
        spread = Layout(tp=2, cp=cp, spread=("vision", "projector"))
        alone = spread.load(projector, load), Layout()
        assert costs.forward_s(projector, load, spread) > costs.forward_s(projector, *alone)
        assert (costs.dgrad_s(projector, load, spread) > costs.dgrad_s(projector, *alone)) == summed


def test_a_spread_encoder_is_gathered_for_a_projector_that_is_not() -> None:
    costs, load = AnalyticCostModel(SCENARIO), LOADS["vision"]
    last = GRAPH.layer(GRAPH.predecessors("projector.0")[0])
    one, both = (Layout(tp=2, spread=names) for names in (("vision",), ("vision", "projector")))
    assert costs.forward_s(last, load, one) > costs.forward_s(last, load, both)
    taken = Layout(tp=2, spread=("projector",))  # which takes parts, whose gradients are gathered
    assert costs.dgrad_s(last, load, taken) > costs.dgrad_s(last, load, Layout(tp=2))
    assert costs.forward_s(last, load, taken) == costs.forward_s(last, load, Layout(tp=2))


def test_a_cut_inside_a_spread_encoder_makes_its_tensor_whole() -> None:
    edge, spread = GRAPH.edge("vision.0", "vision.1"), Layout(tp=2, cp=2, spread=("vision", "projector"))
    assert spread.makes_whole(edge, GRAPH) and not Layout(tp=2).makes_whole(edge, GRAPH)
    assert not spread.makes_whole(GRAPH.edge("projector.0", "llm.embed"), GRAPH)
    gather_s, back_s = AnalyticCostModel(SCENARIO).make_whole_s(2**20, spread)
    assert 0 < gather_s < back_s
    assert AnalyticCostModel(SCENARIO).make_whole_s(2**20, replace(spread, cp=1))[1] > 0


def test_a_rank_sends_its_rows() -> None:
    edge = next(edge for edge in GRAPH.edges() if edge.producer == "llm.0")
    per_row = edge.width * {"fp32": 4, "bf16": 2}[SCENARIO.precision]
    rows = rows_of_context_rank(LOADS["llm"].tokens, 2)
    assert Layout(cp=2).sent_bytes(edge, GRAPH, LOADS, SCENARIO) == rows * per_row
    inner = GRAPH.edge("vision.0", "vision.1")  # not split by cp
    whole = Layout().sent_bytes(inner, GRAPH, LOADS, SCENARIO)
    assert Layout(cp=2).sent_bytes(inner, GRAPH, LOADS, SCENARIO) == whole
