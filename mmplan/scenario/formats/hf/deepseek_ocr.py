"""DeepSeek-OCR, its successors and the files of its own repository: SAM, whose joined tokens pass a second encoder."""

from dataclasses import replace

from mmplan.scenario.document import shown
from mmplan.scenario.formats.hf import sam
from mmplan.scenario.formats.hf.resamplers import encoder_module
from mmplan.scenario.formats.hf.text import language_module, text_module
from mmplan.scenario.formats.hf.vit import vit
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import chain, stepping
from mmplan.scenario.scenario import Model, ModelModule, Transformer
from mmplan.scenario.steps import Average, Dense, Doubled, Fork, Form, Kept, Normed, Steps, conv

# Sizes of the towers that files name `deeplip_b_l` (deepencoder.py of deepseek-ai/DeepSeek-OCR).
SAM_B = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 1024, "patch_size": 16}
CLIP_L = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
CLIP_L |= {"image_size": 224, "patch_size": 14}


def _eyes(fields: Fields, channels: tuple[int, ...]) -> tuple[ModelModule, ModelModule]:
    """SAM, and its neck with convolutions of stride 2."""
    vision, width = sam.tower(fields), fields.count("output_channels")
    steps: Steps = (*sam.neck_steps(width), *(conv(one, 3, stride=2, bias=False) for one in channels))
    return vision, stepping(steps, (vision.output_width, channels[-1]), name="vision_neck", merge=16)


def unlimited(config: Fields, name: str) -> Model:
    """DeepSeek-OCR as transformers has it: CLIP's blocks read SAM's tokens, both are projected side by side."""
    tower = config.part("vision_config")
    llm, eye = text_module(config, "text_config"), tower.part("sam_config")
    return _ocr(config, name, eye, tower.part("encoder_config"), llm, 0)


def _ocr(config: Fields, name: str, eye: Fields, encoder: Fields, llm: ModelModule, unused: int) -> Model:
    width = encoder.count("hidden_size")
    listed = eye.get("downsample_channels")
    channels = (512, 1024) if listed is None else eye.numbers("downsample_channels", count=2)
    vision, neck = _eyes(eye, channels)
    if channels[-1] != width:
        raise encoder.error("hidden_size", f"SAM's tokens have width {channels[-1]}, the second encoder {width}")
    rows = (encoder.side("image_size") // encoder.side("patch_size")) ** 2 + 1
    stored = (rows + 1) * width + unused
    second = encoder_module(vit(encoder, final_norm=False), Form(front=(Normed(),)), name="vision_clip", stored=stored)
    both = Fork(left=(Dense(width=llm.output_width),), right=(Dense(width=llm.output_width, bias=False),))
    config.log.notes.append("the projector's product with SAM's tokens is priced on those of the second encoder")
    last = stepping((both, Kept(size=2 * llm.output_width)), (width, llm.output_width), name="projector")
    return chain(name, vision, neck, second, last, llm)


def ocr2(config: Fields, name: str) -> Model:
    """Learned queries, as many as SAM's joined tokens, stand behind these in a small language model without words."""
    tower, llm = config.part("vision_config"), text_module(config, "text_config")
    encoder = tower.part("encoder_config")
    eye = tower.part("sam_config")
    listed = eye.get("downsample_channels")
    channels = (512, 896) if listed is None else eye.numbers("downsample_channels", count=2)
    vision, neck = _eyes(eye, channels)
    shape = language_module(encoder.read_as_stack("qwen2"), tied=True).transformer
    assert isinstance(shape, Transformer)
    if channels[-1] != shape.hidden:
        raise encoder.error("hidden_size", f"SAM's tokens have width {channels[-1]}, the second encoder {shape.hidden}")
    stored = (144 + 256) * shape.hidden
    second = encoder_module(
        replace(shape, causal=False), Form(front=(Doubled(),)), name="vision_queries", stored=stored
    )
    width = llm.output_width
    steps: Steps = (Average(rows=2), Dense(width=width), Kept(size=width))
    config.log.notes.append("half of the second encoder's tokens are queries, which alone are projected")
    return chain(name, vision, neck, second, stepping(steps, (shape.hidden, width), name="projector", merge=2), llm)


def deepseek_vl_v2(config: Fields, name: str) -> Model:
    """Files of deepseek-ai/DeepSeek-OCR. Parameters are those of its repository: 3,336,106,240."""
    tower, text = config.part("vision_config"), config.part("language_config", kind="unlimited_ocr_text")
    model, named = tower.get("model_name"), config.get("architectures")
    ocr = model == "deeplip_b_l" or (isinstance(named, list) and "DeepseekOCRForCausalLM" in named)
    if not ocr:
        message = (
            f"expected 'deeplip_b_l' (DeepSeek-OCR), found {shown(model)}: the pooling head of DeepSeek-VL2's SigLIP "
        )
        raise tower.error("model_name", f"{message}is described nowhere in transformers")
    text.refuse_unless("use_mla", False, None, why="DeepSeek-OCR's language model has plain attention")
    values = {key: value for key, value in text.values.items() if key not in ("kv_lora_rank", "model_type")}
    text = replace(text, kind="unlimited_ocr_text", values=values)
    llm = language_module(text, tied=text.flag("tie_word_embeddings"))
    eye = replace(config.read_as("unlimited_ocr_sam"), values={**SAM_DEFAULTS, **SAM_B}, path="vision_config")
    clip = replace(config.read_as("clip_vision_model"), values=CLIP_L, path="vision_config")
    config.log.notes.append("the towers are named, not described: the sizes of 'deeplip_b_l' were taken")
    patches = 3 * CLIP_L["patch_size"] ** 2 * CLIP_L["hidden_size"]  # a convolution that nothing enters
    return _ocr(config, name, eye, clip, llm, patches)


SAM_DEFAULTS = {
    "output_channels": 256,
    "window_size": 14,
    "global_attn_indexes": [2, 5, 8, 11],
    "mlp_dim": 3072,
    "qkv_bias": True,
    "use_abs_pos": True,
    "use_rel_pos": True,
    "num_channels": 3,
}
