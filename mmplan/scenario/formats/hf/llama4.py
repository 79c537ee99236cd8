"""Llama 4: a ViT whose tokens are joined 2 x 2, an adapter, and a language model with experts."""

from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import square, vision_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import MAX_LAYERS, chain, projector_module, vit_blocks
from mmplan.scenario.scenario import Model, VisionInput

# Class defaults of transformers 5.24.
VISION = {
    "hidden_size": 768,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "num_channels": 3,
    "intermediate_size": 5632,
    "vision_output_dim": 7680,
    "image_size": 448,
    "patch_size": 14,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
}


def llama4(config: Fields, name: str) -> Model:
    """Every tile counts as an image. A GELU stands behind the projector's linears but the last, as in the model."""
    tower = config.inner("vision_config", VISION)
    hidden, joined = tower.count("hidden_size"), tower.count("intermediate_size")
    if hidden * 4 != joined:
        absent = "" if config.get("vision_config") else " (the class's defaults: this file has no vision_config)"
        message = f"4 joined tokens of width {hidden} are {4 * hidden}, the adapter takes intermediate_size = {joined}"
        raise tower.error("hidden_size", message + absent)
    if tower.count("projector_output_dim") != tower.count("vision_output_dim"):
        message = (
            f"the adapter gives projector_output_dim = {tower.count('projector_output_dim')}, the projector takes "
        )
        raise tower.error("vision_output_dim", f"{message}vision_output_dim = {tower.count('vision_output_dim')}")
    vision = vision_module(
        vit_blocks(tower, tower.count("num_hidden_layers", most=MAX_LAYERS), first_norm=True),
        VisionInput(
            patch=square(tower, "patch_size"),
            channels=tower.count("num_channels"),
            image_size=square(tower, "image_size"),
            class_token=True,
            learned_positions=True,
        ),
    )
    llm = text_module(config, "llama4_text", tied=False)
    dims = (joined, tower.count("projector_input_dim"), tower.count("projector_output_dim"), llm.output_width)
    projector = projector_module("projector", "vision", dims, bias=False, merge=4)
    return chain(name, vision, projector, llm)
