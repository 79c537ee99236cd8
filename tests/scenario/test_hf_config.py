"""Models read from Hugging Face configs have exactly the parameters that transformers builds from the same file."""

import json
from pathlib import Path

import pytest
from hf_oracle import parameter_count, parameters_on_meta

from mmplan.errors import InputError
from mmplan.scenario.formats.hf_config import FAMILIES, bundled_configs, read_hf_config

ROOT = Path(__file__).parents[2]
GIVEN = ROOT.parent / "shared" / "data" / "files" / "hf_config"


def mllama_structure_left_out(hidden: int, cross_layers: int) -> int:
    """What Llama 3.2 has beyond our modules, see `hf_families.mllama`."""
    tile_tables = 9 * 4 * 1601 * 1280 + 2 * 9 * 4 * 1280  # 9 aspect ratios, 4 tiles: positions, before, after
    wider_projector = 5 * 1280 * hidden  # five intermediate outputs of the tower
    extra_rows = 8 * hidden  # of the token table
    gates = 3 + 2 * 8 + 2 * cross_layers  # positions, 8 global layers, cross layers
    cross_norms = 2 * 128 * cross_layers  # on queries and keys
    return tile_tables + wider_projector + extra_rows + gates + cross_norms


LEFT_OUT = {
    "llama-3.2-11b-vision": mllama_structure_left_out(4096, 8),
    "llama-3.2-90b-vision": mllama_structure_left_out(8192, 20),
    "qwen2.5-omni-7b": 2 * 3584,  # the embeddings that mark the ends of audio
    "llava-onevision-7b": 3584,  # the end of an image row
}


@pytest.mark.parametrize("name", bundled_configs())
def test_a_bundled_config_has_the_parameters_of_transformers(name: str) -> None:
    file = bundled_configs()[name]
    assert parameter_count(read_hf_config(file)) + LEFT_OUT.get(name, 0) == parameters_on_meta(file)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("17_veomni_qwen25omni_toy.json", 2 * 3584),
        ("19_veomni_qwen2vl_toy.json", 0),
        ("30_Qwen2.5-VL-7B-Instruct_flat.json", 0),
        ("34_Qwen2-Audio-7B_sparse.json", 0),
        ("36_llava-1.5-7b-hf_sparse_text.json", 0),
        ("02_Qwen__Qwen3-VL-8B-Instruct.json", 0),
        ("10_moonshotai__Kimi-K2.5.json", 0),
        # Mergers of vision blocks 5, 11, 17 of 2, and 8, 16, 24 of 3: two norm vectors, two linears with bias.
        ("21_veomni_qwen3vl_toy.json", 3 * (3 * 4096 + 4096**2 + 4096 * 2048 + 2048)),
        ("22_veomni_qwen3vlmoe_toy.json", 3 * (3 * 4608 + 4608**2 + 4608 * 2048 + 2048)),
    ],
)
def test_flat_and_sparse_files_have_the_parameters_of_transformers(name: str, left_out: int) -> None:
    file = GIVEN / name
    if not file.exists():
        pytest.skip("the folder with given files is absent")
    assert parameter_count(read_hf_config(file)) + left_out == parameters_on_meta(file)


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_flat_and_nested_text_configs_are_the_same(tmp_path: Path, form: str) -> None:
    values = json.loads(bundled_configs()["qwen2.5-vl-7b"].read_text())
    if form == "flat":
        values |= values.pop("text_config")
    file = tmp_path / "qwen2.5-vl-7b.json"
    file.write_text(json.dumps(values))
    assert read_hf_config(file) == read_hf_config(bundled_configs()["qwen2.5-vl-7b"])


BAD = [
    ("[1]", ": expected a JSON object, found a list of 1 item"),
    ("{", ":1: not valid JSON: Expecting property name enclosed in double quotes"),
    (
        '{"model_type": "blip-2"}',
        f": unknown model_type 'blip-2'; known: {', '.join(repr(name) for name in sorted(FAMILIES))}",
    ),
    (
        '{"model_type": "llava"}',
        ": text_config: this key is missing (files of the original LLaVA repository have another form)",
    ),
    (
        '{"model_type": "llava", "text_config": {"model_type": "mixtral"}}',
        ": text_config.model_type: expected 'llama', 'mistral' or 'qwen2', found 'mixtral'",
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
        ": vision_config.num_heads: width 1280 is not a multiple of 7 heads",
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
