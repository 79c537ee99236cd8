from pathlib import Path

import pytest

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.graph import ComputationGraph
from mmplan.planner.contract import GroupGraph, contract
from mmplan.scenario.load import load_scenario


@pytest.fixture(scope="module")
def graph() -> ComputationGraph:
    return build_graph(load_scenario(Path(__file__).parents[2] / "scenarios" / "tiny.yaml"))


def group_of(groups: GroupGraph, layer: str) -> int:
    return next(index for index, members in enumerate(groups.groups) if layer in members)


def test_without_zones_only_logits_and_loss_stay_together(graph: ComputationGraph) -> None:
    groups = contract(graph, ())
    assert [members for members in groups.groups if len(members) > 1] == [("llm.head", "llm.loss")]
    assert sorted(layer for members in groups.groups for layer in members) == sorted(x.id for x in graph.layers())


def test_a_zone_layer_keeps_its_neighbours(graph: ComputationGraph) -> None:
    groups = contract(graph, ("llm.2",))
    assert group_of(groups, "llm.1") == group_of(groups, "llm.2") == group_of(groups, "llm.3")
    assert group_of(groups, "llm.0") != group_of(groups, "llm.1") != group_of(groups, "llm.4")


def test_what_lies_on_a_cycle_with_a_zone_joins_it(graph: ComputationGraph) -> None:
    # llm.embed joins both projectors; nothing between them and it is left outside
    groups = contract(graph, ("llm.embed",))
    zone = group_of(groups, "llm.embed")
    assert {group_of(groups, x) for x in ("projector.0", "audio_projector.0", "llm.0")} == {zone}


def test_groups_are_numbered_along_their_edges(graph: ComputationGraph) -> None:
    for zones in ((), ("vision.1",), ("llm.embed", "llm.4")):
        groups = contract(graph, zones)
        assert all(producer < consumer for producer, consumer in groups.pairs)
