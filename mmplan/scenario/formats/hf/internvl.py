"""InternVL 2.5, 3 and 3.5, dense and with experts: `internvl` of transformers and `internvl_chat` of OpenGVLab."""

from dataclasses import replace
from typing import Any

from mmplan.scenario.document import shown
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import square, vision_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import MAX_LAYERS, SOURCE, chain, vit_blocks
from mmplan.scenario.scenario import Model, ModelModule, Projector, VisionInput

# Class defaults of transformers 5.24.
VISION: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "norm_type": "layer_norm",
    "use_mean_pooling": True,
}
# Defaults of OpenGVLab's InternVisionConfig (InternViT-6B) where they differ.
CHAT_VISION: dict[str, Any] = {
    "hidden_size": 3200,
    "intermediate_size": 12800,
    "num_hidden_layers": 48,
    "num_attention_heads": 25,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 14,
    "norm_type": "rms_norm",
    "qk_normalization": True,
    "use_mean_pooling": True,
}


def internvl(config: Fields, name: str) -> Model:
    """Files of transformers. Image tokens are joined 2 x 2 (pixel shuffle); every tile counts as an image."""
    return _model(config, config.inner("vision_config", VISION), name, text_module(config, "qwen2", tied=True))


def internvl_chat(config: Fields, name: str) -> Model:
    """Files of OpenGVLab: `llm_config` in place of `text_config`."""
    inner = config.inner("llm_config", {})
    values = {**config.values, "text_config": {**inner.values}}
    if inner.get("model_type") == "internlm2":
        values["text_config"]["model_type"] = "llama"  # InternLM2 fuses LLaMA's projections
    nested = replace(config, values=values)
    return _model(nested, config.inner("vision_config", CHAT_VISION), name, text_module(nested, "llama"))


def _model(config: Fields, tower: Fields, name: str, llm: ModelModule) -> Model:
    ratio = config.get("downsample_ratio") or 0.5
    if not isinstance(ratio, float | int) or isinstance(ratio, bool) or ratio not in (0.5, 0.25, 1):
        raise config.error("downsample_ratio", f"expected 1, 0.5 or 0.25, found {shown(ratio)}")
    merge, width = round(1 / ratio) ** 2, llm.output_width
    vision = _tower(tower)
    shape = Projector(dims=(vision.output_width * merge, width, width), merge=merge, norm="layer")
    projector = ModelModule(name="projector", kind="projector", modality="vision", projector=shape, source=SOURCE)
    return chain(name, vision, projector, llm)


def _tower(tower: Fields) -> ModelModule:
    """InternViT: norms over all heads of queries and keys, scaled branches, no norm at the end."""
    blocks = vit_blocks(tower, tower.count("num_hidden_layers", most=MAX_LAYERS), first_norm=False)
    qk_norm = tower.flag("use_qk_norm") or tower.flag("qk_normalization")
    shape = replace(
        blocks,
        norm="rms" if tower.get("norm_type") == "rms_norm" else "layer",
        qkv_bias=tower.flag("attention_bias") or tower.flag("qkv_bias"),
        out_bias=True,
        qk_norm=qk_norm,
        qk_norm_whole=qk_norm,
        layer_scale=True,
        final_norm=not tower.flag("use_mean_pooling"),
    )
    vision = VisionInput(
        patch=square(tower, "patch_size"),
        channels=tower.count("num_channels"),
        image_size=square(tower, "image_size"),
        class_token=True,
        learned_positions=True,
        patch_bias=True,
    )
    return vision_module(shape, vision)
