"""Vision towers for images of any size, by the `model_type` of their configuration class."""

import math
from dataclasses import replace

from mmplan.scenario.formats.hf.blocks_by_layer import kinds_of_layers
from mmplan.scenario.formats.hf.vit import (
    RMS_GATED,
    UNBIASED_GATED,
    native,
    pooling_head,
    vision_module,
    vit,
    whole_patches,
)
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import divided
from mmplan.scenario.scenario import ModelModule, VisionInput
from mmplan.scenario.steps import Convolve, Dense, Fork, Form, Mlp, Normed, Steps, Usual, residual


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


def siglip2(tower: Fields) -> ModelModule:
    """SigLIP 2 for images of any size."""
    vision = native(tower, bias=True, rows=tower.count("num_patches"), channels="num_channels", temporal=False)
    stored = pooling_head(tower) if tower.get("vision_use_head") is not False else 0
    return vision_module(vit(tower), vision, stored)


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


def plain_stretched(tower: Fields) -> ModelModule:
    """SigLIP's blocks with a table of positions that is stretched over images of any size."""
    patch = tower.side("patch_size")
    rows = (whole_patches(tower, patch) // patch) ** 2
    return vision_module(vit(tower), native(tower, bias=True, rows=rows, channels="num_channels", temporal=False))


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


def paddle(tower: Fields) -> ModelModule:
    patch = tower.side("patch_size")
    rows = (whole_patches(tower, patch) // patch) ** 2
    return vision_module(vit(tower), native(tower, bias=True, rows=rows, channels="num_channels", temporal=False))


def ernie(tower: Fields) -> ModelModule:
    shape = vit(tower, heads="num_heads", layers="depth")
    return vision_module(shape, native(tower, bias=False, temporal=False))


def video_llama(tower: Fields) -> ModelModule:
    return vision_module(vit(tower), native(tower, bias=True, channels="num_channels", temporal=False))


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


def cosmos(tower: Fields) -> ModelModule:
    rows = tower.count("num_patches")
    return vision_module(vit(tower), native(tower, bias=True, rows=rows, channels="num_channels", temporal=False))
