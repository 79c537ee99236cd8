"""Models read from Hugging Face configs have exactly the parameters that transformers builds from the same file."""

import json
from pathlib import Path

import pytest
from hf_oracle import parameter_count, parameters_on_meta

from mmplan.errors import InputError
from mmplan.scenario.document import listed
from mmplan.scenario.formats.hf.families import FAMILIES
from mmplan.scenario.formats.hf.stacks import STACKS
from mmplan.scenario.formats.hf_config import bundled_configs, read_config, read_hf_config
from mmplan.scenario.load import load_scenario

ROOT = Path(__file__).parents[2]
GIVEN = ROOT.parent / "shared" / "data" / "files" / "hf_config"


@pytest.mark.parametrize("name", bundled_configs())
def test_a_bundled_config_has_the_parameters_of_transformers(name: str) -> None:
    file = bundled_configs()[name]
    assert parameter_count(read_config(file).model) == parameters_on_meta(file)


def given(*unread: str) -> list[Path]:
    """The given files, but for those whose names start so."""
    return [file for file in sorted(GIVEN.glob("*.json")) if not file.name.startswith(unread)]


@pytest.mark.parametrize("file", given("11_", "14_", "15_", "33_", "35_"), ids=lambda file: file.name)
def test_a_given_file_has_the_parameters_of_transformers(file: Path) -> None:
    assert parameter_count(read_config(file).model) == parameters_on_meta(file)


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_flat_and_nested_text_configs_are_the_same(tmp_path: Path, form: str) -> None:
    values = json.loads(bundled_configs()["qwen2.5-vl-7b"].read_text())
    if form == "flat":
        values |= values.pop("text_config")
    file = tmp_path / "qwen2.5-vl-7b.json"
    file.write_text(json.dumps(values))
    assert read_hf_config(file) == read_hf_config(bundled_configs()["qwen2.5-vl-7b"])


def test_a_scenario_may_name_a_checkpoints_folder(tmp_path: Path) -> None:
    folder = tmp_path / "llava"
    folder.mkdir()
    (folder / "config.json").write_text(bundled_configs()["llava-1.5-7b"].read_text())
    text = (ROOT / "scenarios" / "llava-1.5-7b-sft.yaml").read_text()
    (tmp_path / "own.yaml").write_text(text.replace("hf_config: llava-1.5-7b}", "hf_config: llava}"))
    named = load_scenario(ROOT / "scenarios" / "llava-1.5-7b-sft.yaml")
    assert load_scenario(tmp_path / "own.yaml").model.modules == named.model.modules


BAD = [
    ("[1]", ": expected a JSON object, found a list of 1 item"),
    ("{", ":1: not valid JSON: Expecting property name enclosed in double quotes"),
    (
        '{"model_type": "telescope_net"}',
        f": unknown model_type 'telescope_net'; known: {listed(sorted(FAMILIES))}",
    ),
    (
        '{"model_type": "llava", "text_config": {"model_type": "bert"}}',
        f": text_config.model_type: expected {', '.join(repr(name) for name in sorted(STACKS))}, found 'bert'",
    ),
    (
        '{"model_type": "llava", "text_config": {"num_hidden_layers": 0}}',
        ": text_config.num_hidden_layers: expected a whole number from 1 to 2,000, found 0",
    ),
    (
        '{"model_type": "llava", "text_config": {"num_key_value_heads": 5}}',
        ": text_config.num_key_value_heads: num_attention_heads = 32 is not a multiple of num_key_value_heads = 5",
    ),
    ('{"model_type": "qwen2_vl", "vision_config": 3}', ": vision_config: expected a mapping, found 3"),
    (
        '{"model_type": "qwen2_5_vl", "vision_config": {"fullatt_block_indexes": "all"}}',
        ": vision_config.fullatt_block_indexes: expected a list of layer indices, found 'all'",
    ),
    (
        '{"model_type": "qwen2_vl", "vision_config": {"num_heads": 7}}',
        ": vision_config.num_attention_heads: width 1280 is not a multiple of 7 heads",
    ),
    (
        '{"model_type": "qwen2_vl", "tie_word_embeddings": "no"}',
        ": tie_word_embeddings: expected true or false, found 'no'",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_wrong_config_is_refused_with_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        read_hf_config(file)
    assert str(caught.value) == f"{file}{message}"


def test_every_given_config_is_read_or_refused_with_one_sentence() -> None:
    files = sorted(GIVEN.glob("*.json"))
    if not files:
        pytest.skip("the folder with given files is absent")
    for file in files:
        try:
            read_hf_config(file)
        except InputError as error:
            assert "\n" not in str(error)
