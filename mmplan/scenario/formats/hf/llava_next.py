"""LLaVA-NeXT and LLaVA-OneVision. Tiles of an image count as images; the learned end of an image row is left out."""

from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import SIGLIP, siglip_module, vision_module
from mmplan.scenario.formats.hf_defaults import VISION_DEFAULTS
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import MAX_LAYERS, chain, projector_module, vit_blocks
from mmplan.scenario.scenario import Model, ModelModule, VisionInput


def llava_next(config: Fields, name: str) -> Model:
    """CLIP tower, two linears, LLaMA-like model."""
    tower = config.inner("vision_config", VISION_DEFAULTS["clip_vision_model"])
    vision = vision_module(
        vit_blocks(tower, tower.count("num_hidden_layers", most=MAX_LAYERS), first_norm=True),
        VisionInput(
            patch=tower.count("patch_size"),
            channels=tower.count("num_channels"),
            image_size=tower.count("image_size"),
            class_token=True,
            keep_class_token=config.get("vision_feature_select_strategy") == "full",
            learned_positions=True,
        ),
    )
    return _joined(config, name, vision, text_module(config, "llama", tied=False))


def llava_onevision(config: Fields, name: str) -> Model:
    """SigLIP tower, two linears, Qwen2."""
    defaults = SIGLIP if config.get("vision_config") else SIGLIP | ONEVISION_TOWER
    vision = siglip_module(config.inner("vision_config", defaults))
    return _joined(config, name, vision, text_module(config, "qwen2", tied=False))


# What LlavaOnevisionConfig gives a tower that is not named; a bare SiglipVisionConfig is a smaller model.
ONEVISION_TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 14,
    "image_size": 384,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
}


def _joined(config: Fields, name: str, vision: ModelModule, llm: ModelModule) -> Model:
    width = llm.output_width
    bias = config.get("multimodal_projector_bias")
    return chain(name, vision, projector_module("projector", "vision", (vision.output_width, width, width), bias), llm)
