"""Kimi-K2.5: MoonViT, a patch merger, and a language model of DeepSeek-V3's kind."""

from mmplan.scenario.document import shown
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import vision_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import MAX_LAYERS, SOURCE, chain, divided
from mmplan.scenario.scenario import Model, ModelModule, Projector, Transformer, VisionInput

# Class defaults of transformers 5.24.
VISION = {
    "patch_size": 14,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "merge_kernel_size": [2, 2],
}


def kimi_k25(config: Fields, name: str) -> Model:
    """Keys of MoonViT as in transformers (`hidden_size`) or as on the Hub (`vt_hidden_size`)."""
    tower = config.inner("vision_config", VISION)
    hidden, heads = _hub(tower, "hidden_size"), _hub(tower, "num_attention_heads")
    shape = Transformer(
        layers=_hub(tower, "num_hidden_layers", most=MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(tower, hidden, heads),
        ffn=_hub(tower, "intermediate_size"),
        gated_mlp=False,
        causal=False,
        norm="layer",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )
    rows = tower.count("init_pos_emb_height", "pos_emb_height") * tower.count("init_pos_emb_width", "pos_emb_width")
    vision = vision_module(shape, VisionInput(patch=tower.count("patch_size"), position_rows=rows, patch_bias=True))
    llm = text_module(config, "deepseek_v3", tied=True)
    kernel = tower.get("merge_kernel_size")
    if not isinstance(kernel, list) or len(kernel) != 2 or not all(isinstance(k, int) and k > 0 for k in kernel):
        raise tower.error("merge_kernel_size", f"expected two numbers, found {shown(kernel)}")
    merge = kernel[0] * kernel[1]
    dims = (hidden * merge, hidden * merge, llm.output_width)
    projector = Projector(dims=dims, merge=merge, norm="layer", norm_before_merge=True)
    module = ModelModule(name="projector", kind="projector", modality="vision", projector=projector, source=SOURCE)
    return chain(name, vision, module, llm)


def _hub(tower: Fields, name: str, most: int = 1_000_000) -> int:
    return tower.count(f"vt_{name}", name, most=most)
