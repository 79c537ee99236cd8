"""Towers that files name by an architecture of timm: FastViT (arXiv 2303.14189) of FastVLM, the perception encoder."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmplan.scenario.document import listed, shown
from mmplan.scenario.formats.hf.resamplers import encoder_module
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.vit import BIASES, vision_module, vit
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import chain, projector_module, stepping
from mmplan.scenario.scenario import Model, ModelModule, Transformer, VisionInput
from mmplan.scenario.steps import Active, Attend, Convolve, Dense, Form, Kept, Normed, Steps, conv, residual

FASTVIT: Mapping[str, tuple[tuple[int, int], ...]] = {  # (blocks, width) of each resolution (timm/models/fastvit.py)
    "fastvit_mci3": ((2, 96), (12, 192), (24, 384), (4, 768), (2, 1536)),
}
SIDE = 1024  # pixels (apple/FastVLM-7B, preprocessor_config.json)
# Width, blocks, heads and MLP (timm/models/eva.py).
PERCEPTION: Mapping[str, dict[str, Any]] = {
    "vit_pe_core_large_patch14_336": {"embed_dim": 1024, "depth": 24, "num_heads": 16, "ffn": 4096, "class": True},
    "vit_pe_core_gigantic_patch14_448": {"embed_dim": 1536, "depth": 50, "num_heads": 16, "ffn": 8960, "class": False},
    "vit_pe_lang_large_patch14_448": {"embed_dim": 1024, "depth": 23, "num_heads": 16, "ffn": 4096, "class": True},
    "vit_pe_lang_gigantic_patch14_448": {"embed_dim": 1536, "depth": 47, "num_heads": 16, "ffn": 8960, "class": False},
}


def fast_vlm(config: Fields, name: str) -> Model:
    tower, llm = config.part("vision_config"), text_module(config, "text_config")
    stages, bias = fastvit(tower), config.get("multimodal_projector_bias")
    width = llm.output_width
    return chain(name, *stages, projector_module((stages[-1].output_width, width, width), bias=bias), llm)


def fastvit(fields: Fields) -> tuple[ModelModule, ...]:
    """Depthwise convolutions mix tokens, attention at the last two resolutions; as reparametrised for inference."""
    sizes = FASTVIT[fields.word("architecture", FASTVIT)]
    args = fields.get("model_args")
    if not (args is None or (isinstance(args, dict) and set(args) <= {"inference_mode"})):
        raise fields.error("model_args", f"expected none but inference_mode, found {shown(args)}")
    stages: list[ModelModule] = []
    before = sizes[0][1]
    for index, (count, width) in enumerate(sizes):
        attends = index >= len(sizes) - 2
        mixing: Steps = (Convolve(width=width, taps=9, groups=width),)
        if attends:
            mixing = (residual(Normed(), Attend(), Kept(size=width)),)
        mlp: Steps = (Convolve(width=width, taps=49, groups=width, bias=False), Normed())
        mlp = (*mlp, Dense(width=4 * width), Active(), Dense(width=width), Kept(size=width))
        down: Steps = (Convolve(width=width, taps=49, groups=before, joins=4), Dense(width=width))
        if index == 0:
            down = (conv(width, 3, stride=2), Active(), conv(width, 3, stride=2, groups=width), Dense(width=width))
        front: Steps = (*down, *((Convolve(width=width, taps=49, groups=width),) if attends else ()))
        form = Form(front=front, raw_width=None if index else 3, blocks=((count, (*mixing, residual(*mlp))),))
        shape = _shape(width, count)
        if index:
            stages.append(encoder_module(shape, form, name=f"vision_stage{index}"))
        else:
            stages.append(replace(vision_module(shape, VisionInput(patch=4, image_size=SIDE)), form=form))
        before = width
    wide = 2 * before
    last: Steps = (Convolve(width=wide, taps=9, groups=before), Kept(size=2 * wide * (wide // 16) + wide // 16 + wide))
    return (*stages, stepping(last, (before, wide), name="vision_last"))


def _shape(width: int, layers: int) -> Transformer:
    return Transformer(
        layers=layers,
        hidden=width,
        heads=width // 32,
        kv_heads=width // 32,
        head_dim=32,
        ffn=4 * width,
        gated_mlp=False,
        causal=False,
        norm="layer",
        final_norm=False,
        **{**BIASES, "qkv_bias": False},
    )


def perception_lm(config: Fields, name: str) -> Model:
    """Two linears, then tokens are averaged k x k. A class token, where the tower has one, is dropped."""
    vision, llm = perception(config.part("vision_config")), text_module(config, "text_config")
    pool, width = config.count("projector_pooling_ratio", most=100) ** 2, llm.output_width
    return chain(name, vision, projector_module((vision.output_width, width, width), pool=pool), llm)


def perception(fields: Fields, *, pooled: bool = False) -> ModelModule:
    """Scaled branches, a norm in front, rotary positions beside a table. `pooled`: a head of attention from one learned
    row, whose products are not counted."""
    usual = PERCEPTION[fields.word("architecture", PERCEPTION)]
    args = fields.get("model_args")
    args = args if isinstance(args, dict) else {}
    known = {
        "embed_dim",
        "depth",
        "num_heads",
        "img_size",
        "init_values",
        "ref_feat_shape",
        "use_post_transformer_norm",
    }
    known |= {"global_pool", "num_classes", "mlp_ratio", "class_token", "use_pre_transformer_norm"}
    if not set(args) <= known:
        raise fields.error("model_args", f"expected {listed(sorted(known), 20)}, found {listed(sorted(args), 20)}")
    inner = replace(fields, values={**usual, **args}, defaults={}, path=fields.key("model_args"))
    width = inner.count("embed_dim")
    ratio = inner.get("mlp_ratio")
    ffn = usual["ffn"] if ratio is None else int(width * inner.ratio("mlp_ratio"))
    token = args.get("class_token", usual["class"])
    if (args.get("global_pool", "map") != "" and not pooled) or not isinstance(token, bool):
        raise inner.error("global_pool", "expected '': a pooling head is not read")
    shape = vit(
        inner,
        hidden="embed_dim",
        heads="num_heads",
        layers="depth",
        ffn=ffn,
        norm_first_extra=inner.get("use_pre_transformer_norm") is not False,
        final_norm=inner.get("use_post_transformer_norm") is not False,
        layer_scale=inner.get("init_values") is not None,
    )
    side = inner.side("img_size") if "img_size" in args else int(str(fields.get("architecture")).rpartition("_")[2])
    vision = VisionInput(patch=14, image_size=side // 14 * 14, class_token=token, learned_positions=True)
    width = shape.hidden
    pool = (4 * width + 2 * shape.ffn + 8) * width + shape.ffn if pooled else 0
    return vision_module(shape, vision, pool)
