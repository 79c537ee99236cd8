"""Which layers stand out of a set of values, and what versions of a sensitivity file are read."""

import json
from pathlib import Path

import pytest

from mmplan.errors import InputError
from mmplan.scenario.load import load_scenario
from mmplan.scenario.zone_rules import DEFAULT_RULE, parse_rule

VALUES = {"a": 1.0, "b": 1.1, "c": 5.0, "d": 6.0, "e": 6.5}
TEXT = """\
name: small
model:
  modules:
    llm: {kind: language_model, layers: 5, hidden: 16, heads: 2, kv_heads: 1, ffn: 16, vocabulary: 50}
data: {text_tokens: 100}
batch: {global: 4}
precision: bf16
cluster: {device: h100-sxm, nodes: 1, devices_per_node: 2}
"""


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("top:2", {"d", "e"}),
        ("top:9", set(VALUES)),
        ("above:5", {"d", "e"}),
        ("gap", {"c", "d", "e"}),  # 5 / 1.1 is the widest step
        ("percentile:50", {"d", "e"}),  # the median is 5
        ("percentile:85", {"e"}),  # 6 + 0.4 * 0.5 = 6.2
    ],
)
def test_a_rule_takes_out_what_stands_out(rule: str, expected: set[str]) -> None:
    assert parse_rule(rule).sensitive(VALUES) == expected
    assert str(parse_rule(rule)) == rule


def test_values_without_a_wide_step_have_no_gap() -> None:
    assert parse_rule("gap").sensitive({"a": 1.0, "b": 1.5, "c": 2.9}) == set()
    assert parse_rule("gap").sensitive({"a": -1.0, "b": 0.0, "c": 3.0}) == set()


@pytest.mark.parametrize("rule", ["top:2", "above:9", "gap", "percentile:85"])
def test_equal_values_have_no_zone(rule: str) -> None:
    assert parse_rule(rule).sensitive(dict.fromkeys("abc", 1.0)) == set()
    assert parse_rule(rule).sensitive({}) == set()


@pytest.mark.parametrize("text", ["", "top", "top:0", "top:1.5", "percentile:100", "above:nan", "gap:2", "median:3"])
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no rule: expected percentile:85, top:3, above:2\.5 or gap"):
        parse_rule(text)


def zones(folder: Path, constraints: str, **more: object) -> list[str]:
    layers = {"llm.0": 4, "llm.1": 1, "llm.2": 3, "llm.3": 2, "llm.4": 1}
    (folder / "values.json").write_text(json.dumps({"schema": "mmplan.sensitivity/2", "layers": layers, **more}))
    (folder / "s.yaml").write_text(f"{TEXT}constraints: {{sensitivity: values.json{constraints}}}\n")
    return [zone.name for zone in load_scenario(folder / "s.yaml").constraints.zones]


def test_the_rule_of_a_file_makes_its_zones_unless_the_scenario_has_a_percentile(tmp_path: Path) -> None:
    assert zones(tmp_path, "", rule="top:2") == ["llm.0", "llm.2"]
    assert zones(tmp_path, ", percentile: 85", rule="top:2") == ["llm.0"]  # 3 + 0.4 * 1 = 3.4
    assert zones(tmp_path, "") == ["llm.0"]
    assert str(DEFAULT_RULE) == "percentile:85"


def test_details_and_source_are_left_to_readers(tmp_path: Path) -> None:
    details = {"llm.0": {"parameters": 3, "text": {"low": 1.0}}}
    assert zones(tmp_path, "", details=details, source={"seeds": 2}) == ["llm.0"]


def test_what_is_wrong_in_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"values\.json: rule: 'best' is no rule"):
        zones(tmp_path, "", rule="best")
    with pytest.raises(InputError, match=r"schema: expected a sensitivity file with schema 'mmplan.sensitivity/2'"):
        zones(tmp_path, "", schema=["mmplan.sensitivity/2"])
    with pytest.raises(InputError, match=r"values\.json: rule: unknown key"):  # version 1 had none
        zones(tmp_path, "", schema="mmplan.sensitivity/1", rule="top:2")
