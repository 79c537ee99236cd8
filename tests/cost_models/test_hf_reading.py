"""What `mmplan import` tells of a config.json: modules, defaults, what is left out; and which files are none."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmplan.commands.import_kinds import read_files
from mmplan.cost_models.formats.hf_reading import read_hf_configs
from mmplan.cost_models.formats.module_parameters import module_parameters
from mmplan.errors import InputError
from mmplan.scenario.formats.hf_config import bundled_configs, read_config, read_hf_config
from mmplan.scenario.formats.reading import Reading

TEXT = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 2}
TEXT |= {"vocab_size": 500, "model_type": "llama"}
CLIP = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 2}
CLIP |= {"image_size": 28, "patch_size": 14, "model_type": "clip_vision_model"}
LLAVA: dict[str, Any] = {"model_type": "llava", "text_config": TEXT, "vision_config": CLIP}


def write(folder: Path, values: object, name: str = "config.json") -> Path:
    file = folder / name
    file.write_text(values if isinstance(values, str) else json.dumps(values))
    return file


def reading(folder: Path, values: object) -> Reading:
    return read_hf_configs([write(folder, values)])


def test_modules_are_told_with_parameters_shape_and_tokens(tmp_path: Path) -> None:
    found = reading(tmp_path, LLAVA)
    total, vision, projector, llm, defaults = found.read
    assert total == "llava: 455,232 parameters in 3 modules"
    assert vision.startswith("vision: vision encoder of 1 block, width 64, 4 heads of 16, MLP 96, ")
    assert vision.endswith(" parameters, 4 tokens of an image or tile of its own size")
    assert projector.startswith("projector: projector 64 -> 128 -> 128, 24,832 parameters, 4 tokens")
    assert llm.startswith("llm: language model of 2 blocks, width 128, 4 heads of 32, MLP 96, vocabulary 500, ")
    assert "text_config.attention_bias = false" in defaults and "multimodal_projector_bias = true" in defaults
    assert found.fragment == {"model": {"hf_config": str(tmp_path / "config.json")}}


def test_keys_without_sizes_are_grouped_and_others_named(tmp_path: Path) -> None:
    more = {"eos_token_id": 2, "attention_dropout": 0.1, "rope_theta": 1e6, "num_nextn_predict_layers": 1, "strange": 3}
    ignored = reading(tmp_path, LLAVA | {"text_config": TEXT | more}).ignored
    assert ignored[0] == "nothing reads 1 of the tower's 2 blocks: kept, never computed"
    assert ignored[1].startswith("text_config.num_nextn_predict_layers = 1: layers that predict further tokens")
    assert "token ids and generation: 1 key, on which no size depends" in ignored
    assert "keys that the class does not use for sizes: 'text_config.strange'" in ignored


@pytest.mark.parametrize(
    ("top", "text", "warned"),
    [({}, {}, True), ({}, {"tie_word_embeddings": False}, True), ({"tie_word_embeddings": False}, {}, False)],
)
def test_a_head_that_only_the_class_ties_is_warned_of(
    tmp_path: Path, top: dict[str, Any], text: dict[str, Any], warned: bool
) -> None:
    """Mistral Small 3.1 has 24.0 billion parameters, and 23.3 as transformers' class reads its silent file."""
    mistral = TEXT | {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 32}
    pixtral = {"model_type": "pixtral", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    pixtral |= {"num_hidden_layers": 2, "image_size": 56, "patch_size": 14, "head_dim": 16}
    values = {"model_type": "mistral3", "text_config": mistral | text, "vision_config": pixtral, **top}
    warnings = reading(tmp_path, values).warnings
    assert any("a head of its own" in text for text in warnings) == warned


def test_quantised_and_foreign_checkpoints_are_warned_of(tmp_path: Path) -> None:
    more = {"quantization_config": {"quant_method": "awq", "bits": 4}, "auto_map": {"AutoModel": "m.M"}}
    warnings = reading(tmp_path, LLAVA | more | {"architectures": ["OurLlava"]}).warnings
    assert [text.partition(":")[0] for text in warnings] == ["quantization_config", "auto_map", "architectures"]
    assert "quantised ('awq')" in warnings[0]


def test_linear_attention_and_experts_are_told(tmp_path: Path) -> None:
    values = {"model_type": "qwen3_next", "num_hidden_layers": 4, "mlp_only_layers": [1]}
    llm = reading(tmp_path, values).read[1]
    assert "in 2 of them linear attention with 16 key and 32 value heads, 512 experts of 512, 10 of each token" in llm
    assert "in 1 of them linear attention with 16 key and 32 value heads, MLP 5632" in llm
    assert "in 1 of them 16 heads on 2 of 256, 512 experts" in llm


def test_what_a_family_leaves_out_is_told(tmp_path: Path) -> None:
    thinker = {"text_config": {"num_attention_heads": 16}}
    found = reading(
        tmp_path,
        {
            "model_type": "qwen3_omni_moe",
            "thinker_config": thinker
            | {"audio_config": {"output_dim": 2048}, "vision_config": {"out_hidden_size": 2048}},
        },
    )
    assert found.ignored[0].startswith("the talker, which predicts several codes")


def test_a_name_of_a_tower_is_taken_for_its_sizes(tmp_path: Path) -> None:
    original = {
        **TEXT,
        "model_type": "llava",
        "mm_vision_tower": "openai/clip-vit-large-patch14",
        "mm_hidden_size": 1024,
    }
    found = reading(tmp_path, original | {"mm_projector_type": "mlp2x_gelu", "hidden_size": 256})
    assert "the tower is named, not described: the sizes of 'openai/clip-vit-large-patch14' were taken" in found.ignored
    counts = module_parameters(read_config(tmp_path / "config.json").model)
    assert counts["projector"] == 1024 * 256 + 256 + 256 * 256 + 256
    with pytest.raises(InputError, match="mm_vision_tower: the tower stands in another file: expected 'openai/"):
        reading(tmp_path, original | {"mm_vision_tower": "./my-tower"})


LOOK_ALIKES: dict[str, tuple[object, str]] = {
    "generation": ({"_from_model_config": True, "eos_token_id": 2}, "this is a generation_config.json, not"),
    "generation by hand": ({"do_sample": True, "top_p": 0.9}, "this is a generation_config.json, not"),
    "tokenizer": (
        {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": {}},
        "this is a tokenizer_config.json,",
    ),
    "preprocessor": ({"image_processor_type": "CLIPImageProcessor"}, "this is a preprocessor_config.json, not"),
    "diffusers": ({"_class_name": "Flux", "_diffusers_version": "0.30"}, "this is a file of diffusers"),
    "deepspeed": ({"train_batch_size": 8, "zero_optimization": {"stage": 3}}, "this is DeepSpeed's JSON settings, not"),
    "index": ({"metadata": {}, "weight_map": {}}, "this is the index of a sharded checkpoint, not"),
    "empty": ({}, "this is an empty object, not"),
    "something": ({"colour": "red"}, "model_type: expected a model_type, found 'colour'"),
    "array": ([1, 2], "expected a JSON object, found a list of 2 items"),
    "number": ("3", "expected a JSON object, found 3"),
    "text": ("model_type: llava", "not valid JSON: Expecting value"),
    "deep": ("[" * 100_000, "not valid JSON: nested too deeply"),
    "nested": ('{"model_type": "llava", "a": ' + '{"a": ' * 60 + "1" + "}" * 61, "nested deeper than 40 levels"),
    "kind of kind": ({"model_type": 3}, "model_type: expected a name, found 3"),
    "misspelt": ({"model_type": "lava"}, "unknown model_type 'lava'; did you mean 'llava'?"),
    "fork": (
        {"model_type": "my_llava", "architectures": ["LlavaForConditionalGeneration"]},
        "unknown model_type 'my_llava'; architectures names LlavaForConditionalGeneration, a class of 'llava'",
    ),
    "lie": (
        LLAVA | {"architectures": ["LlavaNextForConditionalGeneration"]},
        "architectures: LlavaNextForConditionalGeneration is a class of 'llava_next', and model_type is 'llava': one",
    ),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_file_that_is_no_config_is_refused_by_what_it_is(tmp_path: Path, name: str) -> None:
    values, message = LOOK_ALIKES[name]
    with pytest.raises(InputError) as caught:
        reading(tmp_path, values)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_type_follows_from_architectures(tmp_path: Path) -> None:
    values = {key: value for key, value in LLAVA.items() if key != "model_type"}
    found = reading(tmp_path, values | {"architectures": ["LlavaForConditionalGeneration"]})
    assert found.read[0].startswith("llava: ")


def test_a_model_without_language_model_is_imported_and_not_planned(tmp_path: Path) -> None:
    file = write(tmp_path, {"model_type": "clip"})
    assert read_hf_configs([file]).read[0] == "clip: 151,277,313 parameters in 4 modules"
    with pytest.raises(InputError, match="no language model, its contrastive loss spans the whole global batch"):
        read_hf_config(file)
    with pytest.raises(InputError, match="no language model, nothing gives a loss"):
        read_hf_config(write(tmp_path, {"model_type": "dinov2"}))


def test_an_adapter_is_read_as_training(tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["v_proj", "q_proj"]}
    found = read_files([str(write(tmp_path, adapter, "adapter_config.json"))])
    assert found.fragment == {"train": {"llm": {"lora": {"rank": 16, "targets": ["q", "v"]}}}}
    for key, value, message in (
        ("peft_type", "IA3", "peft_type: expected 'LORA', found 'IA3'"),
        ("r", 0, "r: expected a rank from 1 to 8,192, found 0"),
        ("target_modules", ["wte"], "target_modules: expected 'q_proj', "),
        ("use_dora", True, "use_dora: the boolean true is not supported"),
    ):
        with pytest.raises(InputError, match=message):
            read_hf_configs([write(tmp_path, adapter | {key: value}, "adapter_config.json")])


WORDS = st.sampled_from(
    ["x", "", -1, 0, 1, 3, 10**30, 1e308, float("nan"), True, None, [], {}, [None], ["a"], "64", 2.5]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_config_is_read_or_refused_with_one_sentence(tmp_path: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(sorted(bundled_configs().values())))
    values = json.loads(file.read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        where = values
        while True:
            key = data.draw(st.sampled_from(sorted(where)))
            if not isinstance(where[key], dict) or not where[key] or data.draw(st.booleans()):
                break
            where = where[key]
        where[key] = data.draw(WORDS)
        if not isinstance(values, dict):
            break
    try:
        found = reading(tmp_path, values)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert all("\n" not in line for line in (*found.read, *found.ignored, *found.warnings))
