"""GLM-4.5V: a gated ViT, a merger with a gated MLP, and a language model with experts."""

from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import square, vision_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import MAX_LAYERS, SOURCE, chain, divided
from mmplan.scenario.scenario import Model, ModelModule, Projector, Transformer, VisionInput

# Class defaults of transformers 5.24.
VISION = {
    "depth": 24,
    "hidden_size": 1536,
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13696,
}


def glm4v_moe(config: Fields, name: str) -> Model:
    """Left out: the bias of the 2 x 2 convolution that joins tokens, and the layer norm behind the next linear."""
    tower = config.inner("vision_config", VISION)
    hidden, heads, width = tower.count("hidden_size"), tower.count("num_heads"), tower.count("out_hidden_size")
    shape = Transformer(
        layers=tower.count("depth", most=MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(tower, hidden, heads),
        ffn=width,  # the blocks' MLP is as wide as the tower's output
        gated_mlp=True,
        causal=False,
        norm="rms",
        qkv_bias=tower.flag("attention_bias"),
        norm_first_extra=True,
    )
    patch = square(tower, "patch_size")
    vision = VisionInput(
        patch=patch,
        channels=tower.count("in_channels"),
        temporal_patch=tower.count("temporal_patch_size"),
        position_rows=(square(tower, "image_size") // patch) ** 2,
        patch_bias=True,
    )
    llm = text_module(config, "glm4v_moe_text", tied=False)
    merge = tower.count("spatial_merge_size", most=100) ** 2
    dims = (hidden * merge, width, width, tower.count("intermediate_size"), width)
    projector = Projector(dims=dims, merge=merge, gated=True, bias=False)
    module = ModelModule(name="projector", kind="projector", modality="vision", projector=projector, source=SOURCE)
    return chain(name, vision_module(shape, vision), module, llm)
