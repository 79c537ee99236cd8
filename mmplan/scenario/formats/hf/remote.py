"""Files whose modelling code stands beside the weights and not in transformers: MiniCPM-V and Phi-3-vision.

Nothing builds them here; their totals are those that the Hub tells (MiniCPM-V-2_6: 8,099,175,152, Phi-3.5-vision:
4,146,621,440).
"""

from dataclasses import replace

from mmplan.scenario.formats.hf.llava_like import LARGE_CLIP
from mmplan.scenario.formats.hf.resamplers import encoder_module, querying
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import TOWERS
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import chain, projector_module, stepping
from mmplan.scenario.scenario import Model
from mmplan.scenario.steps import Attend, Dense, Form, Normed, Steps

# Language model of each version of MiniCPM-V (modeling_minicpmv.py of each repository).
VERSIONS = {"2.5": "llama", "2.6": "qwen2"}


def minicpmv(config: Fields, name: str) -> Model:
    """SigLIP with positions of 70 x 70 patches, one attention from learned queries, whose keys and values pass a linear
    and a norm first, and a matrix behind it. Every slice counts as an image."""
    version = str(config.get("version"))
    if version not in VERSIONS:
        known = ", ".join(f"'{one}'" for one in VERSIONS)
        raise config.error("version", f"expected {known}, whose code is known here, found '{version:.20}'")
    llm, eye = text_module(config.read_as(VERSIONS[version])), config.part("vision_config", kind="siglip_vision_model")
    dropped = 1 if config.flag("drop_vision_last_layer") else 0
    fields = replace(eye.read_as("siglip_vision_model"), values={**eye.values, "vision_use_head": False})
    vision = TOWERS["siglip_vision_model"](fields)
    assert vision.transformer is not None and vision.vision is not None
    vision = replace(vision, transformer=replace(vision.transformer, layers=vision.transformer.layers - dropped))
    width, read = llm.output_width, vision.output_width
    keys: Steps = (Dense(width=width, bias=False), Normed())
    if width % 128:
        raise config.error("hidden_size", f"the resampler has heads of 128, and {width} is not a multiple of it")
    shape = querying(width, width // 128, 1, 1, width)
    block: Steps = (Attend(across=True), Normed(), Dense(width=width, bias=False))
    form = Form(front=(Normed(),), blocks=((1, block),), queries=config.count("query_num"))
    projector = stepping(keys, (read, width), name="projector")
    return chain(name, vision, projector, encoder_module(shape, form, name="resampler"), llm)


def phi3_v(config: Fields, name: str) -> Model:
    """CLIP of 336 pixels by name; 2 x 2 tokens joined, two linears, learned ends of rows and of the first view."""
    eye = config.values.get("img_processor")
    named = eye.get("model_name") if isinstance(eye, dict) else None
    if named != "openai/clip-vit-large-patch14-336":
        message = f"expected 'openai/clip-vit-large-patch14-336', found {named!r:.60}: other towers are not described"
        raise config.error("img_processor", message)
    config.log.read.add("img_processor")
    fields = replace(config.read_as("clip_vision_model"), values=LARGE_CLIP | {"image_size": 336}, path="img_processor")
    llm, vision = text_module(config.read_as("phi3")), TOWERS["clip_vision_model"](fields)
    joined, width = 4 * vision.output_width, llm.output_width
    config.log.notes.append(f"the tower is named, not described: the sizes of '{named}' were taken")
    return chain(name, vision, projector_module((joined, width, width), merge=4, stored=2 * joined), llm)
