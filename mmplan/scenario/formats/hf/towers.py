"""Vision towers by the `model_type` of their configuration class."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from mmplan.scenario.formats.hf import native_towers
from mmplan.scenario.formats.hf.blocks_by_layer import each
from mmplan.scenario.formats.hf.vit import RMS_GATED, fixed, pooling_head, vision_module, vit
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import ModelModule, VisionInput

Tower = Callable[[Fields], ModelModule]


def clip(tower: Fields) -> ModelModule:
    """CLIP: class token, a norm in front of the blocks and one behind them."""
    return vision_module(vit(tower, norm_first_extra=True), fixed(tower, bias=False, class_token=True))


def clip_of_idefics(tower: Fields) -> ModelModule:
    shape = vit(tower, hidden="embed_dim", norm_first_extra=True)
    return vision_module(shape, replace(fixed(tower, bias=False, class_token=True), keep_class_token=True))


def siglip(tower: Fields) -> ModelModule:
    """SigLIP: no class token; its pooling head, where there is one, is not used by language models."""
    stored = pooling_head(tower) if tower.get("vision_use_head") is not False else 0
    return vision_module(vit(tower), fixed(tower), stored)


def idefics(tower: Fields) -> ModelModule:
    """SigLIP's blocks with positions of a fixed grid."""
    return vision_module(vit(tower), fixed(tower))


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


def step(tower: Fields) -> ModelModule:
    """Perception encoder of Step 3.7: scaled branches, a norm in front, none behind."""
    width = tower.count("hidden_size")
    ratio = tower.get("mlp_ratio")
    ffn = int(width * tower.ratio("mlp_ratio")) if ratio is not None else tower.count("intermediate_size")
    shape = vit(tower, ffn=ffn, norm_first_extra=True, final_norm=False, layer_scale=True)
    return vision_module(shape, fixed(tower, bias=False))


def dinov2(tower: Fields) -> ModelModule:
    """Class token and mask token, scaled branches."""
    tower.refuse_unless("use_swiglu_ffn", False, None, why="its gated MLP rounds its width")
    width = tower.count("hidden_size")
    shape = vit(tower, ffn=int(width * tower.ratio("mlp_ratio")), qkv_bias=tower.flag("qkv_bias"), layer_scale=True)
    stored = width if tower.get("use_mask_token") is not False else 0
    stored += (tower.optional("num_register_tokens", least=0) or 0) * width
    return vision_module(shape, replace(fixed(tower, class_token=True), keep_class_token=True), stored)


def aimv2(tower: Fields) -> ModelModule:
    """AIMv2 (arXiv 2411.14402): RMS norms, gated MLPs, a head of attention from one learned row."""
    bias = tower.flag("qkv_bias")
    biases = {"qkv_bias": bias, "out_bias": bias, "mlp_bias": tower.flag("mlp_bias")}
    shape = vit(tower, **{**RMS_GATED, **biases})
    width = shape.hidden
    head = (3 * width + 2 + 2 * bias) * width if tower.get("use_head") is not False else 0
    vision = replace(fixed(tower), learned_positions=not tower.flag("is_native"))
    return vision_module(shape, vision, width + head)


def beit(tower: Fields) -> ModelModule:
    """BEiT (arXiv 2106.08254): no bias on keys, scaled branches, tables of relative positions in each block or one."""
    shape = vit(tower, key_bias=False, layer_scale=bool(tower.get("layer_scale_init_value")), final_norm=False)
    vision = replace(fixed(tower, class_token=True), keep_class_token=True)
    assert vision.image_size is not None
    table = ((2 * (vision.image_size // vision.patch) - 1) ** 2 + 3) * shape.heads
    stored = 2 * shape.hidden + (shape.hidden if tower.flag("use_mask_token") else 0)
    stored += shape.layers * table if tower.flag("use_relative_position_bias") else 0
    stored += table if tower.flag("use_shared_relative_position_bias") else 0
    if not tower.flag("use_absolute_position_embeddings"):
        vision = replace(vision, learned_positions=False)
    return vision_module(shape, vision, stored)


def dinov3(tower: Fields) -> ModelModule:
    """DINOv3 (arXiv 2508.10104): rotary positions, registers, scaled branches."""
    flags = {key: tower.flag(key) for key in ("query_bias", "key_bias", "value_bias")}
    if flags["query_bias"] != flags["value_bias"]:
        raise tower.error("query_bias", "a bias on queries and none on values, or the other way, is not read")
    gated = tower.flag("use_gated_mlp")
    shape = vit(
        tower,
        qkv_bias=flags["query_bias"],
        key_bias=flags["key_bias"],
        out_bias=tower.flag("proj_bias"),
        mlp_bias=tower.flag("mlp_bias"),
        gated_mlp=gated,
        layer_scale=True,
    )
    vision = replace(fixed(tower, class_token=True), keep_class_token=True, learned_positions=False)
    rows = 1 + (tower.optional("num_register_tokens", least=0) or 0)
    return vision_module(shape, vision, rows * shape.hidden)


def mlcd(tower: Fields) -> ModelModule:
    """MLCD (arXiv 2407.17331): CLIP's blocks with rotary positions."""
    tower.refuse_unless("num_key_value_groups", 1, None, why="fewer key-value heads")
    shape = vit(tower, norm_first_extra=True)
    vision = replace(fixed(tower, bias=False, class_token=True), learned_positions=False)
    return vision_module(shape, vision, shape.head_dim // 2)


TOWERS: Mapping[str, Tower] = {
    "aimv2_vision_model": aimv2,
    "beit": beit,
    "dinov3_vit": dinov3,
    "mlcd_vision_model": mlcd,
    "altclip_vision_model": clip,
    "chinese_clip_vision_model": clip,
    "clipseg_vision_model": clip,
    "metaclip_2_vision_model": clip,
    "owlv2_vision_model": clip,
    "owlvit_vision_model": clip,
    "blip_2_vision_model": blip2,
    "blip_vision_model": blip2,
    "clip_vision_model": clip,
    "cohere_compass_vision": native_towers.qwen3_vl,
    "cosmos3_edge_vision": native_towers.cosmos,
    "dinov2": dinov2,
    "dinov2_with_registers": dinov2,
    "tipsv2_vision_model": dinov2,
    "ernie4_5_vl_moe_vision": native_towers.ernie,
    "exaone4_5_vision": native_towers.qwen2_5_vl,
    "gemma4_vision": native_towers.gemma4,
    "git_vision_model": clip,
    "glm5_next_vision": native_towers.glm_ocr,
    "glm4v_moe_vision": native_towers.glm4v,
    "glm4v_vision": native_towers.glm4v,
    "glm_ocr_vision": native_towers.glm_ocr,
    "hy_v4_vl_vision": native_towers.hunyuan,
    "hunyuan_vl_vision": native_towers.hunyuan,
    "lfm3_vl_vision": native_towers.lfm3,
    "molmo2_vision": native_towers.molmo2,
    "idefics2_vision": idefics,
    "idefics_vision": clip_of_idefics,
    "idefics3_vision": idefics,
    "instructblip_vision_model": blip2,
    "instructblipvideo_vision_model": blip2,
    "intern_vit_6b": internvit,
    "internvl_vision": internvit,
    "janus_vision_model": janus,
    "kimi_k25_vision": native_towers.kimi,
    "kosmos_2_5_vision_model": native_towers.pix2struct,
    "kosmos_2_vision_model": clip,
    "llama4_vision_model": llama4,
    "minimax_m3_vl_vision": native_towers.minimax,
    "mllama_vision_model": mllama,
    "moonvit": native_towers.kimi,
    "ovis2_vision": ovis2,
    "paddleocr_vl_vision": native_towers.paddle,
    "phi4_multimodal_vision": siglip,
    "pixtral": native_towers.pixtral,
    "qianfan_ocr_vision": internvit,
    "qwen2_5_omni_vision_encoder": native_towers.qwen2_5_vl,
    "qwen2_5_vl_vision": native_towers.qwen2_5_vl,
    "qwen2_vl_vision": native_towers.qwen2_vl,
    "qwen3_5_moe_vision": native_towers.qwen3_vl,
    "qwen3_5_vision": native_towers.qwen3_vl,
    "qwen4_exp_vision": native_towers.qwen3_vl,
    "qwen3_omni_moe_vision_encoder": native_towers.qwen3_vl,
    "qwen3_vl_moe_vision": native_towers.qwen3_vl,
    "qwen3_vl_vision": native_towers.qwen3_vl,
    "minicpm_ocr_vision": native_towers.plain_stretched,
    "minicpmv4_6_vision": native_towers.plain_stretched,
    "minicpmv4_7_vision": native_towers.plain_stretched,
    "pix2struct_vision_model": native_towers.pix2struct,
    "step3p5_vision": step,
    "radio": native_towers.radio,
    "siglip2_vision_model": native_towers.siglip2,
    "siglip_vision_model": siglip,
    "smolvlm_vision": idefics,
    "step3p7_vision": step,
    "deit": plain,
    "video_llama_3_vision": native_towers.video_llama,
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
