"""The scenarios in `scenarios/` load, hold what they claim, and stay readable when a careless hand edits them."""

import json
import random
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmplan.cost_models.build import build_graph
from mmplan.errors import InputError
from mmplan.scenario.layer_ids import module_layer_ids
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.schema import scenario_json_schema

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "scenarios").glob("*.yaml"))


def test_at_least_ten_scenarios_are_shipped() -> None:
    names = {path.stem for path in SHIPPED}
    assert len(names) >= 12
    assert {"vitl16-llama3-8b", "llama-3.2-90b-vision", "qwen2.5-omni-7b", "tiny", "tiny-rehearsal"} <= names


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_scenario_loads_and_is_named_as_its_file(path: Path) -> None:
    scenario = load_scenario(path)
    assert scenario.name == path.stem
    assert scenario.source
    assert path.read_text().startswith("# yaml-language-server: $schema=../docs/scenario.schema.json\n")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_layer_ids_of_the_loader_are_those_of_the_graph(path: Path) -> None:
    scenario = load_scenario(path)
    known = [layer for module in scenario.model.modules for layer in module_layer_ids(module)]
    assert sorted(known) == sorted(layer.id for layer in build_graph(scenario).layers())


def test_the_schema_file_is_up_to_date() -> None:
    written = json.loads((ROOT / "docs" / "scenario.schema.json").read_text())
    assert written == json.loads(json.dumps(scenario_json_schema())), "run: make schema"


def test_the_omni_scenario_has_two_encoders_and_a_talker() -> None:
    model = load_scenario(ROOT / "scenarios" / "qwen2.5-omni-7b.yaml").model
    assert {module.modality for module in model.modules} == {"vision", "audio", "text", "speech"}
    assert [(edge.producer, edge.consumer) for edge in model.edges if edge.kind == "hidden"] == [("llm", "talker")]


def test_the_90b_scenario_crosses_in_twenty_layers() -> None:
    llm = load_scenario(ROOT / "scenarios" / "llama-3.2-90b-vision.yaml").model.module("llm")
    assert llm.transformer is not None
    assert llm.transformer.cross_layers == tuple(range(3, 100, 5))


TEXT = (ROOT / "scenarios" / "qwen2.5-omni-7b.yaml").read_text(), (ROOT / "scenarios" / "tiny.yaml").read_text()
PIECES = [
    "0",
    "-1",
    "true",
    "null",
    ".nan",
    "1e400",
    "[]",
    "{}",
    "99999999999999999999",
    "x",
    "'",
    ":",
    "\n",
    "- ",
    "&a",
    "*a",
]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**9), text=st.sampled_from(TEXT), edits=st.integers(1, 4))
def test_random_edits_of_a_file_give_a_scenario_or_one_sentence(
    tmp_path: Path, seed: int, text: str, edits: int
) -> None:
    stream = random.Random(seed)
    for _ in range(edits):
        place, length = stream.randrange(len(text)), stream.choice([0, 1, 2, 5, 20])
        text = text[:place] + stream.choice([*PIECES, chr(stream.randrange(1, 0x3000)), ""]) + text[place + length :]
    _loads_or_says_why(tmp_path, text)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**9), text=st.sampled_from(TEXT))
def test_random_values_in_a_file_give_a_scenario_or_one_sentence(tmp_path: Path, seed: int, text: str) -> None:
    stream = random.Random(seed)
    document = yaml.safe_load(text)
    node = document
    while isinstance(node, dict | list) and node:
        key = stream.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not isinstance(node[key], dict | list) or stream.random() < 0.3:
            values = [0, -1, 1, 3, True, None, 2.5, float("nan"), 10**30, "", "llm", [], [1], {}, {"a": 1}, {1: {2: 3}}]
            node[key] = stream.choice(values)
            break
        node = node[key]
    _loads_or_says_why(tmp_path, yaml.safe_dump(document))


def _loads_or_says_why(folder: Path, text: str) -> None:
    file = folder / "edited.yaml"
    file.write_text(text, encoding="utf-8")
    try:
        assert isinstance(load_scenario(file), Scenario)
    except InputError as error:
        assert str(error).startswith(str(file))
        assert "\n" not in str(error)
