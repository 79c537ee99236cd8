"""Zones of a scenario file: what they name, what they forbid, and what a sensitivity file makes of layers."""

import json
from pathlib import Path

import pytest

from mmplan.cost_models.degrees import divides, tp_degrees
from mmplan.errors import InputError
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.zones import under_zones

TEXT = """\
name: small
model:
  modules:
    vision: {kind: vision_encoder, layers: 4, hidden: 64, heads: 4, ffn: 128, patch: 8, image_size: 64}
    projector: {kind: projector, dims: [64, 128]}
    llm: {kind: language_model, layers: 8, hidden: 128, heads: 4, kv_heads: 2, ffn: 256, vocabulary: 500}
  edges:
    - [vision, projector]
    - [projector, llm]
data: {text_tokens: 100, images: 1}
batch: {global: 16}
precision: bf16
cluster: {device: h100-sxm, nodes: 1, devices_per_node: 4}
"""


def load(folder: Path, constraints: str, more: str = "", layers: object = None, schema: str = "") -> Scenario:
    if layers is not None:
        values = {"schema": schema or "mmplan.sensitivity/1", "layers": layers}
        (folder / "values.json").write_text(json.dumps(values))
    path = folder / "s.yaml"
    path.write_text(TEXT + more + f"constraints: {constraints}\n")
    return load_scenario(path)


def test_zones_keep_the_names_that_the_file_writes(tmp_path: Path) -> None:
    rules = load(tmp_path, "{no_split: [vision.1-2, projector, llm.head]}").constraints
    assert [zone.name for zone in rules.zones] == ["vision.1-2", "projector", "llm.head"]
    assert rules.no_split == ("vision.1", "vision.2", "projector.0", "llm.head")
    assert all(zone.forbid == ("split",) for zone in rules.zones)


def test_a_scenario_without_a_zone_is_the_one_that_never_had_it(tmp_path: Path) -> None:
    both = load(tmp_path, "{no_split: [vision.1, llm.0-3], forbid: [tensor_sharding]}")
    one = load(tmp_path, "{no_split: [vision.1], forbid: [tensor_sharding]}")
    assert under_zones(both, both.constraints.zones[:1]) == one
    assert [module.whole for module in both.model.modules] == [True, False, True]
    assert [module.whole for module in one.model.modules] == [True, False, False]


def test_a_zone_that_forbids_tensor_sharding_keeps_its_module_whole(tmp_path: Path) -> None:
    vision = load(tmp_path, "{no_split: [vision.1], forbid: [tensor_sharding]}")
    assert not divides(vision.model.module("vision"), 2)
    assert divides(vision.model.module("vision"), 1)
    assert tp_degrees(vision) == (1, 2)  # two key-value heads; the encoder runs whole on part of the images
    assert tp_degrees(load(tmp_path, "{no_split: [llm.1], forbid: [tensor_sharding]}")) == (1,)


def test_layers_above_the_percentile_of_their_modality_are_zones(tmp_path: Path) -> None:
    """Percentile 50 of 1, 2, 3, 4 is 2.5; of 10, 10, 30 it is 10. The runs above: vision.2-3 and llm.5."""
    layers = {"vision.0": 1, "vision.1": 2, "vision.2": 3, "vision.3": 4, "llm.0": 10, "llm.1": 10, "llm.5": 30}
    zones = load(tmp_path, "{sensitivity: values.json, percentile: 50}", layers=layers).constraints.zones
    assert [(zone.name, zone.layers) for zone in zones] == [
        ("vision.2-3", ("vision.2", "vision.3")), ("llm.5", ("llm.5",)),
    ]  # fmt: skip


def test_one_modality_in_which_a_layer_is_sensitive_is_enough(tmp_path: Path) -> None:
    """As published: embedding 0.87/1.24, block 3 2.15/1.98, block 7 0.43/0.39; here 7 stands out for text."""
    layers = {
        "llm.embed": {"vision": 0.87, "text": 1.24},
        "llm.3": {"vision": 2.15, "text": 1.98},
        "llm.7": {"vision": 0.43, "text": 5.0},
    }
    zones = load(tmp_path, "{sensitivity: values.json}", layers=layers).constraints.zones
    assert [zone.name for zone in zones] == ["llm.3", "llm.7"]


def test_equal_values_make_no_zone(tmp_path: Path) -> None:
    layers = dict.fromkeys(["vision.0", "vision.1", "llm.0"], 1.0)
    assert load(tmp_path, "{sensitivity: values.json}", layers=layers).constraints.zones == ()


# (constraints, more text, layers of values.json, schema of it, end of the message)
BAD = [
    (
        "{no_split: [llm.1], forbid: [compression]}",
        "",
        None,
        "",
        "s.yaml:14: constraints.forbid[0]: constraints.compression allows none, so there is nothing to forbid; "
        "remove 'compression'",
    ),
    (
        "{no_split: [llm.1], forbid: [fp9]}",
        "",
        None,
        "",
        "expected 'split', 'tensor_sharding', 'fp8', 'low_precision_reduce' or 'compression', found 'fp9'; "
        "did you mean 'fp8'?",
    ),
    (
        "{no_split: [llm.1], forbid: [low_precision_reduce]}",
        "optimizer: {gradient_dtype: bf16}\n",
        None,
        "",
        "all gradients are summed in bf16 alike; set the gradient_dtype of optimizer and technique to fp32, "
        "or remove 'low_precision_reduce' here",
    ),
    (
        "{forbid: [tensor_sharding]}",
        "",
        None,
        "",
        "constraints.forbid: there is no zone: no_split is empty and sensitivity not given",
    ),
    (
        "{no_split: [llm.1, llm.3-4], forbid: [tensor_sharding], tp: [2, 4]}",
        "",
        None,
        "",
        "constraints.forbid: tensor_sharding is forbidden in 'llm.1', 'llm.3-4', which leaves tp = 1 for "
        "'llm', and constraints.tp allows 2, 4",
    ),
    (
        "{percentile: 90}",
        "",
        None,
        "",
        "constraints.percentile: a percentile needs the values it is of: name their file in 'sensitivity'",
    ),
    (
        "{sensitivity: values.json, percentile: 100}",
        "",
        {},
        "",
        "constraints.percentile: expected less than 100.0, found 100",
    ),
    (
        "{sensitivity: nowhere.json}",
        "",
        None,
        "",
        "s.yaml:14: constraints.sensitivity: no such file 'nowhere.json'",
    ),
    (
        "{sensitivity: values.json}",
        "",
        {},
        "",
        "values.json: layers: expected a value for each layer, found an empty mapping",
    ),
    (
        "{sensitivity: values.json}",
        "",
        {"llm.0": 1},
        "hessian",
        "values.json: schema: expected a sensitivity file with schema 'mmplan.sensitivity/2', found 'hessian'",
    ),
    (
        "{sensitivity: values.json}",
        "",
        {"llm.9": 1},
        "",
        "values.json: layers.llm.9: unknown layer 'llm.9'; 'llm' has 8 blocks, the last is 'llm.7'",
    ),
    (
        "{sensitivity: values.json}",
        "",
        {"llm.0": "high"},
        "",
        "values.json: layers.llm.0: expected a finite number, found 'high'",
    ),
    (
        "{sensitivity: values.json}",
        "",
        {"llm.0": float("nan")},
        "",
        "values.json: layers.llm.0: expected a finite number, found nan",
    ),
    (
        "{sensitivity: values.json}",
        "",
        {"llm.0": {"visoin": 1}},
        "",
        "values.json: layers.llm.0: unknown modality 'visoin'; did you mean 'vision'?",
    ),
]


@pytest.mark.parametrize(
    ("constraints", "more", "layers", "schema", "message"), BAD, ids=[case[-1][:60] for case in BAD]
)
def test_what_is_wrong_is_said_in_one_sentence(
    tmp_path: Path, constraints: str, more: str, layers: object, schema: str, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, constraints, more, layers, schema)
    assert str(caught.value).endswith(message), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sensitivity_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "values.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        load(tmp_path, "{sensitivity: values.json}")
