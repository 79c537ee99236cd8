"""Qwen3-VL, dense and with experts: tokens of inner vision blocks are added behind the first language blocks."""

from dataclasses import replace

from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import vision_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import MAX_LAYERS, divided, edge, merger_module
from mmplan.scenario.scenario import Model, ModelEdge, ModelModule, Transformer, VisionInput

# Class defaults of transformers 5.24.
VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}


def qwen3_vl(config: Fields, name: str) -> Model:
    """Dense and MoE. Mergers for vision blocks that do not exist, which small configs have, are left out."""
    tower = config.inner("vision_config", VISION)
    vision = _tower(tower)
    kind = "qwen3_vl_moe_text" if config.get("model_type") == "qwen3_vl_moe" else "qwen3_vl_text"
    llm = text_module(config, kind, tied=False)
    assert vision.transformer is not None and llm.transformer is not None
    width = tower.count("out_hidden_size")
    projector = merger_module("projector", tower, vision.output_width, width, "layer")
    inner = tower.indices("deepstack_visual_indexes", vision.transformer.layers)[: llm.transformer.layers]
    deep = [_deepstack_merger(f"deepstack{position}", projector) for position in range(len(inner))]
    edges = [edge("vision", "projector", "input"), edge("projector", "llm", "merge")]
    for position, (block, module) in enumerate(zip(inner, deep, strict=True)):
        edges.append(ModelEdge(producer="vision", consumer=module.name, kind="input", producer_layer=block))
        edges.append(ModelEdge(producer=module.name, consumer="llm", kind="add", consumer_layer=position))
    return Model(name=name, modules=(vision, projector, *deep, llm), edges=tuple(edges))


def _tower(tower: Fields) -> ModelModule:
    hidden, heads = tower.count("hidden_size"), tower.count("num_heads")
    shape = Transformer(
        layers=tower.count("depth", most=MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(tower, hidden, heads),
        ffn=tower.count("intermediate_size"),
        gated_mlp=False,
        causal=False,
        norm="layer",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        final_norm=False,
    )
    vision = VisionInput(
        patch=tower.count("patch_size"),
        channels=tower.count("in_channels"),
        temporal_patch=tower.count("temporal_patch_size"),
        position_rows=tower.count("num_position_embeddings"),
        patch_bias=True,
    )
    return vision_module(shape, vision)


def _deepstack_merger(name: str, projector: ModelModule) -> ModelModule:
    """Like the last merger, but the norm acts on joined tokens."""
    assert projector.projector is not None
    return replace(projector, name=name, projector=replace(projector.projector, norm_before_merge=False))
