"""Gemma 3 with vision."""

from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import SIGLIP, siglip_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import SOURCE, chain
from mmplan.scenario.scenario import Model, ModelModule, Projector


def gemma3(config: Fields, name: str) -> Model:
    """SigLIP, whose tokens are averaged to `mm_tokens_per_image`, a norm and one linear."""
    tower = config.inner("vision_config", SIGLIP)
    vision, llm = siglip_module(tower), text_module(config, "gemma3_text", tied=True)
    assert vision.vision is not None and vision.vision.image_size is not None
    patches = (vision.vision.image_size // vision.vision.patch) ** 2
    kept = config.count("mm_tokens_per_image") if config.get("mm_tokens_per_image") is not None else 256
    if patches % kept:
        raise config.error("mm_tokens_per_image", f"{patches} patches cannot be averaged to {kept} tokens")
    shape = Projector(dims=(vision.output_width, llm.output_width), pool=patches // kept, norm="rms", bias=False)
    projector = ModelModule(name="projector", kind="projector", modality="vision", projector=shape, source=SOURCE)
    return chain(name, vision, projector, llm)
