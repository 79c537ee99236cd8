"""Real models laid onto the layers that the planner sees: same parameters, same edges."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from ghost_models import FAMILIES, joined, saved_config
from tiny_plans import tiny_scenario

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import parameters
from mmplan.cost_models.graph import ComputationGraph
from mmplan.errors import InputError
from mmplan.runtime.ghost.alignment import align, used_pieces
from mmplan.runtime.ghost.recording import Recorder
from mmplan.runtime.ghost.traffic import Owners, recorded_graph
from mmplan.runtime.ghost.units import find_units, parameter_names
from mmplan.runtime.ghost.weightless import build_weightless
from mmplan.scenario.formats.hf_config import read_hf_config

PLANNED = [name for name in FAMILIES if name != "whisper"]  # its decoder is not in the planner's vocabulary

# Edges that only the model has, and only the plan.
KNOWN = {
    # Features are added behind a block: the model's glue leaves that to the next one.
    "qwen3_vl": (
        {"deepstack0.0>llm.1", "deepstack1.0>llm.2"},
        {"deepstack0.0>llm.0", "deepstack1.0>llm.1"},
    ),
    # The projector reads the states behind earlier blocks too.
    "mllama": ({"vision.0>projector.0", "vision.1>projector.0"}, set()),
}
KNOWN["qwen3_vl_moe"] = KNOWN["qwen3_vl"]


def planned_graph(name: str, folder: Path) -> ComputationGraph:
    config = saved_config(FAMILIES[name]()[0](), folder)
    return build_graph(replace(tiny_scenario(), model=read_hf_config(config)))


@pytest.mark.parametrize("name", PLANNED)
def test_a_model_of_transformers_is_laid_onto_the_plan(name: str, tmp_path: Path) -> None:
    graph = planned_graph(name, tmp_path)
    build, batch = FAMILIES[name]()
    model = build_weightless(build)
    recording = Recorder(model, find_units(model)).record(batch)
    layer_of = align(graph, model, [recording])
    used = used_pieces([recording])
    assert used - {""} <= layer_of.keys()
    sizes = dict.fromkeys((layer.id for layer in graph.layers()), 0)
    for piece, layer in layer_of.items():
        sizes[layer] += sum(model.get_parameter(key).numel() for key in parameter_names(model, piece))
    blocks = [layer for layer in graph.layers() if layer.kind == "block" and layer.index > 0]
    assert all(sizes[la.id] >= parameters(la) for la in blocks)
    owners = Owners(layer_of=layer_of, loss_layer="llm.loss", used=frozenset(used & layer_of.keys()))
    recorded = {edge.name for edge in recorded_graph(graph, [recording], owners).edges()}
    # What the planner lets into the token table, where it is merged, the model's own glue hands to the first block.
    planned = {edge.name.replace(">llm.embed", ">llm.0") for edge in graph.edges()}
    assert (recorded - planned, planned - recorded) == KNOWN.get(name, (set(), set()))


def test_a_model_of_other_layers_is_refused_with_the_counts(tmp_path: Path) -> None:
    graph = planned_graph("llava", tmp_path)
    build, batch = joined()
    model = build_weightless(build)
    recording = Recorder(model, find_units(model)).record(batch)
    with pytest.raises(InputError, match=r"uses 329 parameters, the plan's layers have 46,744"):
        align(graph, model, [recording])


def test_batches_that_never_use_the_tower_are_named(tmp_path: Path) -> None:
    graph = planned_graph("llava", tmp_path)
    build, batch = FAMILIES["llava"]()
    model = build_weightless(build)
    text = {key: value for key, value in batch.items() if key != "pixel_values"}
    recording = Recorder(model, find_units(model)).record(text)
    tower = r"'model\.vision_tower\.(vision_model\.)?embeddings'"
    with pytest.raises(InputError, match=rf"no batch of the 1 looked at uses {tower} \(8 such"):
        align(graph, model, [recording])
