"""Robots' policies: PI0, a PaliGemma whose blocks a smaller Gemma over states and actions reads layer by layer."""

from dataclasses import replace

from mmplan.scenario.formats.hf.llava_like import paligemma
from mmplan.scenario.formats.hf.text import language_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import Model, TextInput

# What the class takes where a file has no vlm_config.
USUAL = {
    "text_config": {
        "model_type": "gemma",
        "hidden_size": 2048,
        "num_hidden_layers": 18,
        "intermediate_size": 16384,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "vocab_size": 257152,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "intermediate_size": 4304,
        "hidden_size": 1152,
        "patch_size": 14,
        "image_size": 224,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "vision_use_head": False,
    },
}


def pi0(config: Fields, name: str) -> Model:
    """Rows of actions attend to their own and the language model's keys: the latter's products are not counted."""
    if config.values.get("vlm_config") is None:
        config = replace(config, values={**config.values, "vlm_config": USUAL})
    outer = config.part("vlm_config")
    size = outer.part("text_config").count("vocab_size")
    fields = config.part("dit_config")
    fields = replace(fields, values={**fields.values, "vocab_size": size})
    seen = paligemma(outer, name)
    llm = seen.module("llm")
    body = replace(llm, kind="text_encoder", text=TextInput(positions="rotary"))
    actions = language_module(fields, tied=True, name="actions")
    width = actions.output_width
    state, action = config.count("max_state_dim"), config.count("max_action_dim")
    once = (action + 1) * width + (state + 1) * width + (2 * width + 1) * width + (width + 1) * width
    once += (width + 1) * action
    rows = TextInput(tokens=config.count("chunk_size") + 1, positions="rotary")
    actions = replace(actions, kind="text_encoder", modality="text", text=rows, stored=actions.stored + once)
    config.log.notes.append("rows of actions read the language model's keys: those products are not counted")
    return replace(seen, modules=(*(body if m is llm else m for m in seen.modules), actions))
