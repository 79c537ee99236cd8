"""Encoders whose images are cut along patch groups: what a rank runs, sends and gathers, and which encoders can be."""

from dataclasses import replace

import pytest
from small_models import projector, scenario_of, vision_audio_model

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.collectives import Group, gather_s
from mmplan.cost_models.layout import Layout, spread_text, trained_on_rank
from mmplan.cost_models.load import Load
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.local_layer import backward_sum_bytes, forward_sum_bytes
from mmplan.cost_models.patches import patch_modules, row_changing
from mmplan.cost_models.planned_memory import planned_kept_bytes
from mmplan.cost_models.shard import Shard

SCENARIO = scenario_of(vision_audio_model())
GRAPH = build_graph(SCENARIO)
LOADS = mean_loads(SCENARIO, 8)
EMBED, BLOCK, PROJECTOR = (GRAPH.layer(name) for name in ("vision.embed", "vision.0", "projector.0"))
BOTH = ("vision", "projector")
PATCHES = Layout(tp=2, cp=2, spread=BOTH, patches=("vision",))


def test_blocks_have_a_part_of_the_rows_and_all_weights() -> None:
    assert (PATCHES.shard(BLOCK), PATCHES.shard(EMBED), PATCHES.shard(PROJECTOR)) == (Shard(cp=4), Shard(), Shard())
    assert trained_on_rank(BLOCK, PATCHES) == trained_on_rank(BLOCK, replace(PATCHES, patches=()))
    few = Load(sequences=1, tokens=64, pairs=64**2, window_pairs=64**2, input_elements=64 * 192, outputs=64)
    assert PATCHES.load(BLOCK, few) == PATCHES.load(EMBED, few) == few
    kept, alone = (planned_kept_bytes(BLOCK, few, SCENARIO, layout) for layout in (PATCHES, Layout()))
    assert kept == pytest.approx(alone / 4, rel=0.01)


def test_one_image_is_faster_cut_than_whole_on_one_of_four_ranks_and_many_are_not() -> None:
    costs, images = AnalyticCostModel(SCENARIO), replace(PATCHES, patches=())
    one = Load(sequences=1, tokens=2**16, pairs=2**32, window_pairs=2**32, outputs=2**16)
    many = Load(sequences=64, tokens=2**16, pairs=2**26, window_pairs=2**26, outputs=2**16)
    assert costs.forward_s(BLOCK, one, PATCHES) < costs.forward_s(BLOCK, one, images)
    assert costs.forward_s(BLOCK, many, PATCHES) > costs.forward_s(BLOCK, many, images)


def test_rows_cross_stages_as_parts_and_become_whole_for_others() -> None:
    """Of readers that take images the gradients are gathered, of others they are summed over cp."""
    last = GRAPH.layer(GRAPH.predecessors("projector.0")[0])
    assert PATCHES.handover(last) == (True, False, True)
    assert replace(PATCHES, spread=("vision",)).handover(last) == (True, True, False)
    assert PATCHES.handover(EMBED) == (False, False, False)
    inner = GRAPH.edge("vision.0", "vision.1")
    sizes = [layout.sent_bytes(inner, GRAPH, LOADS, SCENARIO) for layout in (PATCHES, Layout())]
    assert sizes[0] < sizes[1] / 3
    for edge in (GRAPH.edge("vision.embed", "vision.0"), GRAPH.edge(last.id, "projector.0")):
        assert not PATCHES.makes_whole(edge, GRAPH)
        whole = [layout.sent_bytes(edge, GRAPH, LOADS, SCENARIO) for layout in (PATCHES, Layout())]
        assert whole[0] == whole[1]


def test_a_projector_along_patches_sums_its_results_instead_of_gathering_what_it_reads() -> None:
    """Four rows of width 32 become one of 128 on four ranks, which exchange as much as the results are, each way; in
    front of it nothing is gathered."""
    modules = (projector("projector", merge=4) if m.name == "projector" else m for m in SCENARIO.model.modules)
    joining = replace(SCENARIO, model=replace(SCENARIO.model, modules=tuple(modules)))
    graph = build_graph(joining)
    layer, last = (graph.layer(name) for name in ("projector.0", *graph.predecessors("projector.0")))
    through = replace(PATCHES, patches=BOTH)
    assert (through.shard(layer), through.handover(last)) == (Shard(cp=4), (False, False, False))
    assert through.handover(layer) == PATCHES.handover(layer) == (True, True, False)
    load = Load(sequences=1, tokens=16, context_tokens=64, outputs=16)
    for count in (forward_sum_bytes, backward_sum_bytes):
        assert count(layer, load, "bf16", through.shard(layer)) == 16 * 128 * 2
        assert count(layer, load, "bf16", Shard()) == 0
    costs, link = AnalyticCostModel(joining), SCENARIO.cluster.pools[0].node_link
    more = costs.forward_s(layer, load, through) - costs.forward_s(layer, load, PATCHES)
    # products of so few rows take as long as their launch
    assert more == pytest.approx(gather_s(16 * 128 * 2, Group(4, 4), link, link))


def test_rows_go_to_their_places_where_tp_is_1_and_modules_run_each_microbatch_alone() -> None:
    row = Layout(cp=4, spread=BOTH, patches=BOTH)
    assert PROJECTOR.placed and row.places(PROJECTOR)
    others = replace(row, tp=2), replace(row, cp=1), replace(row, patches=("vision",))
    assert not any(layout.places(PROJECTOR) for layout in (*others, replace(row, together=BOTH, batch_factor=2)))
    costs, load = AnalyticCostModel(SCENARIO), Load(sequences=1, tokens=1024, context_tokens=4096, outputs=1024)
    size = 1024 * PROJECTOR.output.width * 2
    whole_s, both_s = costs.make_whole_s(size, row)
    placed_s = costs.place_rows_s(size, row)
    told = replace(PROJECTOR, placed=False)
    assert costs.forward_s(told, load, row) - costs.forward_s(PROJECTOR, load, row) == pytest.approx(whole_s - placed_s)
    saved_s = costs.dgrad_s(told, load, row) - costs.dgrad_s(PROJECTOR, load, row)
    assert saved_s == pytest.approx(both_s - whole_s - placed_s)


def test_class_tokens_that_are_dropped_speak_against_it_and_sound_that_is_pooled_does_not() -> None:
    vision = SCENARIO.model.module("vision")
    assert vision.vision is not None and vision.vision.class_token
    plain = replace(vision, vision=replace(vision.vision, class_token=False))
    modules = tuple(plain if module.name == "vision" else module for module in SCENARIO.model.modules)
    model = replace(SCENARIO.model, modules=modules)
    sound = ("audio", "audio_projector")
    assert patch_modules(model) == ("vision", "audio", "projector", "audio_projector")
    assert patch_modules(SCENARIO.model) == sound
    assert [row_changing(SCENARIO.model, name) for name in ("vision", "audio")] == ["DropClassToken", ""]
    assert row_changing(model, "vision") == ""


def test_a_sentence_says_how_modules_are_spread() -> None:
    assert spread_text((), ()) == ""
    assert spread_text(BOTH, ("vision",)) == ", projector spread, vision cut along patches"
