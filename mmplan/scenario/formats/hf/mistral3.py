"""Models with Pixtral's tower: Pixtral-12B (as `llava`) and Mistral 3."""

from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import PIXTRAL, pixtral_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import SOURCE, chain, projector_module
from mmplan.scenario.scenario import Model, ModelModule, Projector


def pixtral(config: Fields, name: str) -> Model:
    """Pixtral-12B: a `llava` config whose tower is a `pixtral`; tokens are not merged."""
    vision = pixtral_module(config.inner("vision_config", PIXTRAL))
    llm = text_module(config, "mistral", tied=False)
    width, bias = llm.output_width, config.get("multimodal_projector_bias")
    return chain(name, vision, projector_module("projector", "vision", (vision.output_width, width, width), bias), llm)


def mistral3(config: Fields, name: str) -> Model:
    """Mistral Small 3.1: a norm, tokens joined 2 x 2 by a linear, two more linears. A GELU stands between all of them
    here, between the last two in the model."""
    for key in ("text_config", "vision_config"):
        if config.get(key) is None:
            raise config.error(key, "this key is missing; the class's defaults for it are one particular model")
    vision = pixtral_module(config.inner("vision_config", PIXTRAL))
    llm = text_module(config, "mistral", tied=True)
    side = config.count("spatial_merge_size", most=100) if config.get("spatial_merge_size") is not None else 2
    width, merge = llm.output_width, side**2
    shape = Projector(
        dims=(vision.output_width * merge, vision.output_width, width, width),
        merge=merge,
        norm="rms",
        norm_before_merge=True,
        bias=config.flag("multimodal_projector_bias"),
    )
    projector = ModelModule(name="projector", kind="projector", modality="vision", projector=shape, source=SOURCE)
    return chain(name, vision, projector, llm)
