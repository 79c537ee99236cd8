"""Encoders whose images are cut along patch groups: what a rank runs, sends and gathers, and which encoders can be."""

from dataclasses import replace

import pytest
from small_models import scenario_of, vision_audio_model

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.layout import Layout, spread_text, trained_on_rank
from mmplan.cost_models.load import Load
from mmplan.cost_models.loads import mean_loads
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


def test_class_tokens_that_are_dropped_and_pools_speak_against_it() -> None:
    vision = SCENARIO.model.module("vision")
    assert vision.vision is not None and vision.vision.class_token
    plain = replace(vision, vision=replace(vision.vision, class_token=False))
    modules = tuple(plain if module.name == "vision" else module for module in SCENARIO.model.modules)
    model = replace(SCENARIO.model, modules=modules)
    assert patch_modules(model) == BOTH and patch_modules(SCENARIO.model) == ()
    assert [row_changing(SCENARIO.model, name) for name in ("vision", "audio")] == ["DropClassToken", "Pool"]
    assert row_changing(model, "vision") == ""


def test_a_sentence_says_how_modules_are_spread() -> None:
    assert spread_text((), ()) == ""
    assert spread_text(BOTH, ("vision",)) == ", projector spread, vision cut along patches"
