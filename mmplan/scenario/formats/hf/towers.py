"""Vision towers by the `model_type` of their configuration class."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from mmplan.scenario.formats.hf.blocks_by_layer import each, kinds_of_layers
from mmplan.scenario.formats.hf.vit import RMS_GATED, UNBIASED_GATED, fixed, native, vision_module, vit, whole_patches
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import divided
from mmplan.scenario.scenario import ModelModule, VisionInput
from mmplan.scenario.steps import Convolve, Dense, Fork, Form, Mlp, Normed, Steps, Usual, residual

Tower = Callable[[Fields], ModelModule]


def clip(tower: Fields) -> ModelModule:
    """CLIP: class token, a norm in front of the blocks and one behind them."""
    return vision_module(vit(tower, norm_first_extra=True), fixed(tower, bias=False, class_token=True))


def clip_of_idefics(tower: Fields) -> ModelModule:
    shape = vit(tower, hidden="embed_dim", norm_first_extra=True)
    return vision_module(shape, replace(fixed(tower, bias=False, class_token=True), keep_class_token=True))


def pix2struct(tower: Fields) -> ModelModule:
    """Kosmos-2.5 and Pix2Struct: unfolded patches of any size, tables of rows and of columns, RMS norms, gated MLP."""
    heads, head_dim = tower.count("num_attention_heads"), tower.optional("head_dim", "d_kv")
    rows = tower.count("max_num_patches", "seq_len")
    shape = vit(
        tower,
        ffn=tower.count("intermediate_size", "d_ff"),
        norm="rms",
        gated_mlp=True,
        activation="gelu",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        head_dim=head_dim or divided(tower, tower.count("hidden_size"), heads),
    )
    width = tower.count("patch_embed_hidden_size")
    side = math.isqrt(width // 3)
    if 3 * side**2 != width:
        raise tower.error("patch_embed_hidden_size", f"{width} numbers are no square patch of three colours")
    vision = VisionInput(patch=side, position_rows=rows, patch_bias=True)
    return vision_module(shape, vision, rows * shape.hidden)


def siglip(tower: Fields) -> ModelModule:
    """SigLIP: no class token; its pooling head, where there is one, is not used by language models."""
    stored = _pooling_head(tower) if tower.get("vision_use_head") is not False else 0
    return vision_module(vit(tower), fixed(tower), stored)


def siglip2(tower: Fields) -> ModelModule:
    """SigLIP 2 for images of any size."""
    vision = native(tower, bias=True, rows=tower.count("num_patches"), channels="num_channels", temporal=False)
    stored = _pooling_head(tower) if tower.get("vision_use_head") is not False else 0
    return vision_module(vit(tower), vision, stored)


def _pooling_head(tower: Fields) -> int:
    """Parameters of attention from one learned query, a norm and an MLP."""
    width, ffn = tower.count("hidden_size"), tower.count("intermediate_size")
    return width + 4 * (width * width + width) + 2 * width + 2 * width * ffn + width + ffn


def idefics(tower: Fields) -> ModelModule:
    """SigLIP's blocks with positions of a fixed grid."""
    return vision_module(vit(tower), fixed(tower))


def pixtral(tower: Fields) -> ModelModule:
    """Pixtral: any size, rotary positions, gated MLP, RMS norms, one of them before the first block."""
    silu = "silu" if tower.get("hidden_act") in ("silu", "swish") else "gelu"
    shape = vit(
        tower,
        norm="rms",
        gated_mlp=True,
        activation=silu,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        head_dim=tower.optional("head_dim"),
        norm_first_extra=True,
        final_norm=False,
    )
    return vision_module(shape, native(tower, bias=False, channels="num_channels", temporal=False))


def internvit(tower: Fields) -> ModelModule:
    """InternViT: norms over all heads of queries and keys, scaled branches, no norm at the end."""
    qk_norm = tower.flag("use_qk_norm") or tower.flag("qk_normalization")
    bias = tower.flag("attention_bias") or tower.flag("qkv_bias")
    shape = vit(
        tower,
        norm="rms" if tower.get("norm_type") == "rms_norm" else "layer",
        qkv_bias=bias,
        qk_norm=qk_norm,
        qk_norm_whole=qk_norm,
        qk_norm_kind="rms",
        layer_scale=True,
        final_norm=tower.get("use_mean_pooling") is False,
    )
    vision = fixed(tower, class_token=True)
    if tower.kind != "intern_vit_6b":
        mask = shape.hidden if tower.flag("use_mask_token") else 0
        if not tower.flag("use_absolute_position_embeddings"):
            vision = replace(vision, learned_positions=False)
        return vision_module(shape, vision, mask)
    return vision_module(shape, vision)


def qwen2_vl(tower: Fields) -> ModelModule:
    """Native resolution, layer norms, plain MLP."""
    hidden = tower.count("embed_dim")
    ratio = tower.ratio("mlp_ratio")
    shape = vit(tower, hidden="embed_dim", heads="num_heads", layers="depth", ffn=int(hidden * ratio), final_norm=False)
    return vision_module(shape, native(tower, bias=False))


def qwen2_5_vl(tower: Fields) -> ModelModule:
    """Native resolution, RMS norms, gated MLP, attention in windows except in a few layers."""
    shape = vit(tower, heads="num_heads", layers="depth", final_norm=False, **RMS_GATED)
    if tower.kind == "exaone4_5_vision":
        shape = replace(shape, kv_heads=tower.optional("num_key_value_heads") or shape.heads)
    window = (tower.count("window_size", most=100_000) // tower.count("patch_size")) ** 2 or 1
    whole = tower.indices("fullatt_block_indexes", shape.layers)
    shape = replace(shape, window_tokens=window, global_layers=whole)
    return vision_module(shape, native(tower, bias=False, channels=_channels(tower)))


def _channels(tower: Fields) -> str:
    """`in_channels` or, in files of before 2025, `in_chans`, which the class does not read."""
    return "in_channels"


def qwen3_vl(tower: Fields) -> ModelModule:
    """Native resolution, layer norms, plain MLP, a stretched table of positions."""
    shape = vit(tower, heads="num_heads", layers="depth", final_norm=False)
    rows = tower.count("num_position_embeddings")
    return vision_module(shape, native(tower, bias=True, rows=rows))


def glm4v(tower: Fields) -> ModelModule:
    """GLM-4V: RMS norms, a gated MLP as wide as the tower's output, a norm behind the patches."""
    bias = tower.flag("attention_bias")
    shape = vit(
        tower,
        heads="num_heads",
        layers="depth",
        ffn=tower.count("out_hidden_size"),
        qkv_bias=bias,
        out_bias=False,
        mlp_bias=False,
        norm_first_extra=True,
        norm="rms",
        gated_mlp=True,
        activation="silu",
    )
    patch = tower.side("patch_size")
    rows = (whole_patches(tower, patch) // patch) ** 2
    return vision_module(shape, native(tower, bias=True, rows=rows))


def glm_ocr(tower: Fields) -> ModelModule:
    """GLM-OCR: norms on queries and keys, biases, no positions but rotary ones."""
    bias = tower.flag("attention_bias")
    shape = vit(
        tower, heads="num_heads", layers="depth", qkv_bias=bias, out_bias=bias, mlp_bias=bias, qk_norm=True, **RMS_GATED
    )
    return vision_module(shape, native(tower, bias=True))


def kimi(tower: Fields) -> ModelModule:
    """MoonViT, with keys as in transformers (`hidden_size`) or as on the Hub (`vt_hidden_size`)."""
    hub = {key.removeprefix("vt_"): value for key, value in tower.values.items() if key.startswith("vt_")}
    tower = replace(tower, values={**tower.values, **hub})
    rows = tower.count("init_pos_emb_height", "pos_emb_height") * tower.count("init_pos_emb_width", "pos_emb_width")
    vision = VisionInput(patch=tower.count("patch_size"), position_rows=rows, patch_bias=True)
    return vision_module(vit(tower), vision)


def llama4(tower: Fields) -> ModelModule:
    """Every tile counts as an image."""
    width = tower.count("hidden_size")
    shape = vit(tower, norm_first_extra=True, ffn=tower.count("intermediate_size"))
    vision = fixed(tower, bias=False, class_token=True)
    joined = width * 4
    if joined != shape.ffn:
        message = f"4 joined tokens of width {width} are {joined}, the adapter takes intermediate_size = {shape.ffn}"
        absent = "" if tower.values else " (the class's defaults: this file has no vision_config)"
        raise tower.error("hidden_size", message + absent)
    return vision_module(shape, vision)


def mllama(tower: Fields) -> ModelModule:
    """Llama 3.2: tiles attend jointly; gates in the global layers, tables of tile positions with gates."""
    own, more = tower.layers(), tower.layers("num_global_layers")
    shape = vit(tower, heads="attention_heads", qkv_bias=False, out_bias=False, norm_first_extra=True)
    shape = each(replace(shape, layers=own + more), lambda i, block: replace(block, stored=2) if i >= own else block)
    tiles = tower.count("max_num_tiles", most=1_000)
    vision = replace(
        fixed(tower, bias=False, class_token=True), keep_class_token=True, tiles=tiles, joint_tiles=tiles > 1
    )
    assert vision.image_size is not None
    ratios = tower.get("supported_aspect_ratios")
    count = len(ratios) if isinstance(ratios, list) else 8  # [1, 1] to [4, 1]
    rows = (vision.image_size // vision.patch) ** 2 + 1
    stored = (count + 1) * tiles * shape.hidden * (rows + 2) + 3
    return vision_module(shape, vision, stored)


def plain_stretched(tower: Fields) -> ModelModule:
    """SigLIP's blocks with a table of positions that is stretched over images of any size."""
    patch = tower.side("patch_size")
    rows = (whole_patches(tower, patch) // patch) ** 2
    return vision_module(vit(tower), native(tower, bias=True, rows=rows, channels="num_channels", temporal=False))


def plain(tower: Fields) -> ModelModule:
    """ViT, DeiT (a second token in front) and BEiT's kin: class token, biases, a pooler on the class token."""
    shape = vit(tower, qkv_bias=tower.flag("qkv_bias"))
    pooled = tower.optional("pooler_output_size") or shape.hidden
    stored = shape.hidden * pooled + pooled
    stored += 2 * shape.hidden if tower.kind == "deit" else 0  # the distillation token and its position
    return vision_module(shape, replace(fixed(tower, class_token=True), keep_class_token=True), stored)


def janus(tower: Fields) -> ModelModule:
    ratio, width = tower.ratio("mlp_ratio"), tower.count("hidden_size")
    qk_norm = tower.flag("use_qk_norm")
    shape = vit(
        tower, ffn=int(width * ratio), qkv_bias=tower.flag("attention_bias"), qk_norm=qk_norm, qk_norm_whole=qk_norm
    )
    return vision_module(shape, fixed(tower))


def blip2(tower: Fields) -> ModelModule:
    """EVA's ViT: no bias on keys, yet the class stores one for all three."""
    return vision_module(vit(tower, qkv_bias=tower.get("qkv_bias") is not False), _with_class(tower))


def _with_class(tower: Fields) -> VisionInput:
    channels = "num_channels" if "num_channels" in {*tower.values, *tower.defaults} else "channels"
    if channels == "channels":
        tower = replace(tower, values={**tower.values, "channels": 3})
    return replace(fixed(tower, class_token=True, channels=channels), keep_class_token=True)


def gemma4(tower: Fields) -> ModelModule:
    """Norms on both sides and on queries and keys, a gated MLP, two tables of positions added together. Tokens are
    averaged behind it."""
    bias = tower.flag("attention_bias")
    shape = vit(
        tower,
        norm="rms",
        gated_mlp=True,
        activation="gelu",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=False,
        qk_norm=True,
        post_norms=True,
        final_norm=False,
        kv_heads=tower.count("num_key_value_heads"),
        head_dim=tower.count("head_dim"),
    )
    rows = tower.count("position_embedding_size")
    vision = VisionInput(patch=tower.side("patch_size"), position_rows=rows)
    return vision_module(shape, vision, rows * shape.hidden)


def ovis2(tower: Fields) -> ModelModule:
    """RMS norms and a gated MLP; the head turns each token into probabilities of visual words."""
    bias = tower.flag("qkv_bias")
    shape = vit(
        tower,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=tower.flag("mlp_bias"),
        norm_first_extra=False,
        **RMS_GATED,
    )
    return vision_module(shape, fixed(tower), stored=shape.hidden)


def paddle(tower: Fields) -> ModelModule:
    patch = tower.side("patch_size")
    rows = (whole_patches(tower, patch) // patch) ** 2
    return vision_module(vit(tower), native(tower, bias=True, rows=rows, channels="num_channels", temporal=False))


def ernie(tower: Fields) -> ModelModule:
    shape = vit(tower, heads="num_heads", layers="depth")
    return vision_module(shape, native(tower, bias=False, temporal=False))


def video_llama(tower: Fields) -> ModelModule:
    return vision_module(vit(tower), native(tower, bias=True, channels="num_channels", temporal=False))


def step(tower: Fields) -> ModelModule:
    """Perception encoder of Step 3.7: scaled branches, a norm in front, none behind."""
    width = tower.count("hidden_size")
    ratio = tower.get("mlp_ratio")
    ffn = int(width * tower.ratio("mlp_ratio")) if ratio is not None else tower.count("intermediate_size")
    shape = vit(tower, ffn=ffn, norm_first_extra=True, final_norm=False, layer_scale=True)
    return vision_module(shape, fixed(tower, bias=False))


def minimax(tower: Fields) -> ModelModule:
    shape = vit(tower, norm_first_extra=True, final_norm=False)
    return vision_module(shape, native(tower, bias=False, channels="num_channels"))


def hunyuan(tower: Fields) -> ModelModule:
    """A table of positions stretched over images of any size, with a row for a class token that is not there."""
    rows = (tower.count("max_image_size", most=100_000) // tower.side("patch_size")) ** 2 + 1
    kv_heads = tower.optional("num_key_value_heads") or tower.count("num_attention_heads")
    vision = native(tower, bias=True, rows=rows, channels="num_channels", temporal=False)
    return vision_module(vit(tower, final_norm=False, kv_heads=kv_heads), vision)


def molmo2(tower: Fields) -> ModelModule:
    side = 378 if tower.get("image_size") is None else tower.side("image_size")
    rows = tower.optional("num_position_embeddings") or (side // tower.side("patch_size")) ** 2
    shape = vit(tower, head_dim=tower.optional("head_dim"), final_norm=False)
    return vision_module(shape, native(tower, bias=True, rows=rows, channels="num_channels", temporal=False))


def lfm3(tower: Fields) -> ModelModule:
    """Convolutions over the neighbours of each patch between gates, but for layers that attend; gated MLPs."""
    kv_heads, heads = tower.count("num_key_value_heads"), tower.count("num_attention_heads")
    shape = vit(tower, kv_heads=kv_heads, norm_first_extra=True, final_norm=False, qk_norm=True, **UNBIASED_GATED)
    if heads % kv_heads:
        raise tower.error("num_key_value_heads", f"{heads} heads are not a multiple of {kv_heads}")
    types = kinds_of_layers(
        tower, shape.layers, ("conv", "full_attention"), lambda i: "conv" if i < 2 or i % 2 else "full_attention"
    )
    width = shape.hidden
    taps = tower.count("conv_kernel_size", most=100) ** 2
    rms, linear = Normed(kind="rms"), Dense(width=width, bias=False)
    mixed: Steps = (
        Fork(left=(linear,), right=(linear,), product=True),
        Convolve(width=width, taps=taps, groups=width, bias=False),
    )
    gated = residual(rms, Fork(left=(linear,), right=mixed, product=True), linear)
    plain: Steps = (gated, residual(rms, Mlp()))
    form = Form(blocks=tuple((1, plain if word == "conv" else (Usual(),)) for word in types))
    return replace(vision_module(shape, native(tower, bias=False)), form=form)


def radio(tower: Fields) -> ModelModule:
    """RADIO: class and register tokens in front of any number of patches, a table stretched over them, scaled branches;
    a second linear for pairs of frames."""
    width, patch = tower.count("hidden_size"), tower.side("patch_size")
    tower.refuse_unless("use_swiglu_ffn", False, None, why="its gated MLP rounds its width")
    shape = vit(tower, ffn=int(width * tower.ratio("mlp_ratio")), qkv_bias=tower.flag("qkv_bias"), layer_scale=True)
    rows = (tower.count("max_img_size", most=100_000) // patch) ** 2
    extra = tower.count("num_cls_tokens", least=0) + tower.count("num_registers", least=0)
    frames = tower.optional("video_temporal_patch_size")
    channels = tower.count("num_channels", most=1_000)
    again = frames * channels * patch**2 * width if frames else 0
    vision = VisionInput(patch=patch, channels=channels, position_rows=rows)
    return vision_module(replace(shape, final_norm=False), vision, extra * width + again)


def dinov2(tower: Fields) -> ModelModule:
    """Class token and mask token, scaled branches."""
    tower.refuse_unless("use_swiglu_ffn", False, None, why="its gated MLP rounds its width")
    width = tower.count("hidden_size")
    shape = vit(tower, ffn=int(width * tower.ratio("mlp_ratio")), qkv_bias=tower.flag("qkv_bias"), layer_scale=True)
    stored = width if tower.get("use_mask_token") is not False else 0
    return vision_module(shape, replace(fixed(tower, class_token=True), keep_class_token=True), stored)


def cosmos(tower: Fields) -> ModelModule:
    rows = tower.count("num_patches")
    return vision_module(vit(tower), native(tower, bias=True, rows=rows, channels="num_channels", temporal=False))


TOWERS: Mapping[str, Tower] = {
    "altclip_vision_model": clip,
    "chinese_clip_vision_model": clip,
    "clipseg_vision_model": clip,
    "metaclip_2_vision_model": clip,
    "owlv2_vision_model": clip,
    "owlvit_vision_model": clip,
    "blip_2_vision_model": blip2,
    "blip_vision_model": blip2,
    "clip_vision_model": clip,
    "cosmos3_edge_vision": cosmos,
    "dinov2": dinov2,
    "ernie4_5_vl_moe_vision": ernie,
    "exaone4_5_vision": qwen2_5_vl,
    "gemma4_vision": gemma4,
    "git_vision_model": clip,
    "glm4v_moe_vision": glm4v,
    "glm4v_vision": glm4v,
    "glm_ocr_vision": glm_ocr,
    "hunyuan_vl_vision": hunyuan,
    "lfm3_vl_vision": lfm3,
    "molmo2_vision": molmo2,
    "idefics2_vision": idefics,
    "idefics_vision": clip_of_idefics,
    "idefics3_vision": idefics,
    "instructblip_vision_model": blip2,
    "instructblipvideo_vision_model": blip2,
    "intern_vit_6b": internvit,
    "internvl_vision": internvit,
    "janus_vision_model": janus,
    "kimi_k25_vision": kimi,
    "kosmos_2_5_vision_model": pix2struct,
    "kosmos_2_vision_model": clip,
    "llama4_vision_model": llama4,
    "minimax_m3_vl_vision": minimax,
    "mllama_vision_model": mllama,
    "moonvit": kimi,
    "ovis2_vision": ovis2,
    "paddleocr_vl_vision": paddle,
    "phi4_multimodal_vision": siglip,
    "pixtral": pixtral,
    "qianfan_ocr_vision": internvit,
    "qwen2_5_omni_vision_encoder": qwen2_5_vl,
    "qwen2_5_vl_vision": qwen2_5_vl,
    "qwen2_vl_vision": qwen2_vl,
    "qwen3_5_moe_vision": qwen3_vl,
    "qwen3_5_vision": qwen3_vl,
    "qwen3_omni_moe_vision_encoder": qwen3_vl,
    "qwen3_vl_moe_vision": qwen3_vl,
    "qwen3_vl_vision": qwen3_vl,
    "minicpm_ocr_vision": plain_stretched,
    "minicpmv4_6_vision": plain_stretched,
    "minicpmv4_7_vision": plain_stretched,
    "pix2struct_vision_model": pix2struct,
    "step3p5_vision": step,
    "radio": radio,
    "siglip2_vision_model": siglip2,
    "siglip_vision_model": siglip,
    "smolvlm_vision": idefics,
    "step3p7_vision": step,
    "deit": plain,
    "video_llama_3_vision": video_llama,
    "vit": plain,
}


def tower_of(config: Fields, *keys: str, kind: str | None = None) -> ModelModule:
    """The vision tower of a nested config.

    Raises:
        InputError: an unknown model_type, or a size that is missing or impossible.
    """
    tower = config.part(*(keys or ("vision_config",)), kind=kind)
    build = TOWERS.get(tower.kind)
    if build is None:
        known = ", ".join(f"'{name}'" for name in sorted(TOWERS))
        raise tower.error("model_type", f"the vision tower '{tower.kind:.60}' is not read; known: {known}")
    return build(tower)
