"""Families of tower, projector and language model, each with the projector of its class."""

from dataclasses import replace

from mmplan.scenario.document import shown
from mmplan.scenario.formats.hf.read_layer import up_to_read_layer
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import TOWERS, tower_of
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import chain, merger_module, projector_module
from mmplan.scenario.scenario import Model, ModelModule


def vip_llava(config: Fields, name: str) -> Model:
    """Several layers of the tower side by side, a norm, two linears; the norm is stored, its work that of one layer."""
    layers = config.get("vision_feature_layers")
    if not isinstance(layers, list) or not 0 < len(layers) < 100:
        raise config.error("vision_feature_layers", f"expected a list of layers, found {shown(layers)}")
    vision, llm = _classed(config, tower_of(config)), text_module(config, "text_config")
    width, joined = llm.output_width, len(layers) * vision.output_width
    dims = (vision.output_width, width, width)
    return chain(name, vision, projector_module(dims, reads=len(layers), stored=2 * joined), llm)


def _one_layer(config: Fields) -> None:
    """The projector reads one layer of the tower; several are joined to a wider input, which is not read."""
    layer = config.get("vision_feature_layer")
    if isinstance(layer, list) and len(layer) != 1:
        message = f"the projector reads {len(layer)} layers of the tower side by side, which has no cost model"
        raise config.error("vision_feature_layer", message)


def _classed(config: Fields, vision: ModelModule) -> ModelModule:
    """The tower with its class token handed on where the config says `full`."""
    if vision.vision is None or not vision.vision.class_token:
        return vision
    keep = config.get("vision_feature_select_strategy") == "full"
    return replace(vision, vision=replace(vision.vision, keep_class_token=keep))


def llava(config: Fields, name: str) -> Model:
    """LLaVA 1.5 and Pixtral-12B: two linears."""
    if config.has("mm_vision_tower"):
        return original_llava(config, name)
    _one_layer(config)
    vision = up_to_read_layer(config, _classed(config, tower_of(config)))
    llm = text_module(config, "text_config")
    width, bias = llm.output_width, config.get("multimodal_projector_bias")
    return chain(name, vision, projector_module((vision.output_width, width, width), bias=bias), llm)


def llava_next(config: Fields, name: str) -> Model:
    """LLaVA-NeXT, LLaVA-OneVision, LLaVA-NeXT-Video: tiles count as images; a learned end of each image row."""
    model = llava(config, name)
    llm = model.module("llm")
    modules = tuple(
        replace(module, stored=module.stored + llm.output_width) if module.name == "projector" else module
        for module in model.modules
    )
    return replace(model, modules=modules)


# Sizes of towers that original LLaVA files name: config.json of each on the Hub.
NAMED_TOWERS = {
    "openai/clip-vit-large-patch14": {"image_size": 224},
    "openai/clip-vit-large-patch14-336": {"image_size": 336},
    "google/siglip-so400m-patch14-384": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 14,
    },
}
LARGE_CLIP = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
}


def original_llava(config: Fields, name: str) -> Model:
    """Files of the original LLaVA repository: the text config at the top, the tower by name alone."""
    tower = config.get("mm_vision_tower")
    known = ", ".join(f"'{each}'" for each in NAMED_TOWERS)
    if not isinstance(tower, str) or tower not in NAMED_TOWERS:
        raise config.error(
            "mm_vision_tower", f"the tower stands in another file: expected {known}, found {shown(tower)}"
        )
    siglip = "siglip" in tower
    sizes = NAMED_TOWERS[tower] if siglip else LARGE_CLIP | NAMED_TOWERS[tower]
    fields = replace(config.read_as("siglip_vision_model" if siglip else "clip_vision_model"), values=sizes)
    vision = TOWERS[fields.kind](fields)
    if vision.vision is not None and vision.vision.class_token:
        keep = config.get("mm_vision_select_feature") == "cls_patch"
        vision = replace(vision, vision=replace(vision.vision, keep_class_token=keep))
    vision = up_to_read_layer(config, vision, "mm_vision_select_layer")
    kind = {"llava": "llama", "llava_llama": "llama", "llava_mistral": "mistral", "llava_qwen": "qwen2"}[config.kind]
    text = config.read_as(kind)
    llm = text_module(text)
    projector = config.get("mm_projector_type") or "linear"
    depths = {"linear": 1, "mlp2x_gelu": 2, "mlp3x_gelu": 3}
    if projector not in depths:
        raise config.error("mm_projector_type", f"expected 'linear' or 'mlp2x_gelu', found {shown(projector)}")
    width = config.optional("mm_hidden_size") or vision.output_width
    if width != vision.output_width:
        raise config.error("mm_hidden_size", f"'{tower}' has width {vision.output_width}, found {width}")
    unpad = "unpad" in str(config.get("mm_patch_merge_type"))
    module = projector_module(
        (vision.output_width, *(llm.output_width,) * depths[projector]), stored=llm.output_width if unpad else 0
    )
    config.log.notes.append(f"the tower is named, not described: the sizes of '{tower}' were taken")
    return chain(name, vision, module, llm)


def gemma3(config: Fields, name: str) -> Model:
    vision, llm = tower_of(config), text_module(config, "text_config")
    return chain(name, vision, pooled_to(config, vision, llm.output_width), llm)


def pooled_to(config: Fields, vision: ModelModule, width: int) -> ModelModule:
    """Tokens are averaged to `mm_tokens_per_image`, a norm and one linear."""
    assert vision.vision is not None and vision.vision.image_size is not None
    patches = (vision.vision.image_size // vision.vision.patch) ** 2
    kept = config.count("mm_tokens_per_image")
    if patches % kept:
        raise config.error("mm_tokens_per_image", f"{patches} patches cannot be averaged to {kept} tokens")
    return projector_module((vision.output_width, width), pool=patches // kept, norm="rms", bias=False)


def hyperclovax(config: Fields, name: str) -> Model:
    """Qwen2.5-VL's tower with its merger, and one more linear."""
    vision, tower = tower_of(config), config.part("vision_config")
    llm, width = text_module(config, "text_config"), tower.count("out_hidden_size")
    merger = merger_module(tower, vision.output_width, width, "rms", "merger")
    return chain(name, vision, merger, projector_module((width, llm.output_width)), llm)


def paligemma(config: Fields, name: str) -> Model:
    """One linear to `projection_dim`, which has to be the language model's width."""
    vision, llm = tower_of(config), text_module(config, "text_config")
    tower = config.part("vision_config")
    width = tower.optional("projection_dim") or config.count("projection_dim")
    return chain(name, vision, projector_module((vision.output_width, width)), llm)


def idefics3(config: Fields, name: str) -> Model:
    """Idefics3 and SmolVLM: scale x scale tokens joined, one linear. Every tile counts as an image."""
    vision, llm = tower_of(config), text_module(config, "text_config")
    merge = config.count("scale_factor", most=100) ** 2
    dims = (vision.output_width * merge, llm.output_width)
    return chain(name, vision, projector_module(dims, merge=merge, bias=False), llm)


def aya(config: Fields, name: str) -> Model:
    """Aya Vision and Command A Vision: tokens joined, (a norm and) a gated MLP half as wide as the config says."""
    _one_layer(config)
    vision, llm = tower_of(config), text_module(config, "text_config")
    merge = config.count("downsample_factor", most=100) ** 2
    inner = config.optional("alignment_intermediate_size") or llm.output_width
    if inner % 2:
        raise config.error("alignment_intermediate_size", f"{inner} cannot be halved for the gate")
    dims = (vision.output_width * merge, inner // 2, llm.output_width)
    norm = "layer" if config.kind == "aya_vision" else None
    return chain(name, vision, projector_module(dims, merge=merge, gated=True, norm=norm), llm)  # type: ignore[arg-type]


def lfm2(config: Fields, name: str) -> Model:
    vision, llm = tower_of(config), text_module(config, "text_config")
    merge = config.count("downsample_factor", most=100) ** 2
    dims = (vision.output_width * merge, config.count("projector_hidden_size"), llm.output_width)
    norm = "layer" if config.flag("projector_use_layernorm") else None
    bias = config.get("projector_bias")
    return chain(name, vision, projector_module(dims, merge=merge, norm=norm, bias=bias), llm)  # type: ignore[arg-type]


def mistral3(config: Fields, name: str) -> Model:
    """Mistral Small 3.1, LightOnOCR: a norm, tokens joined 2 x 2 by a linear, two more linears. A GELU stands between
    all of them here, between the last two in the model."""
    _one_layer(config)
    vision, llm = tower_of(config), text_module(config, "text_config")
    merge, width = config.count("spatial_merge_size", most=100) ** 2, llm.output_width
    bias = config.flag("multimodal_projector_bias")
    stored = -vision.output_width if bias else 0  # the linear that joins has none
    dims = (vision.output_width * merge, vision.output_width, width, width)
    if stored:
        raise config.error("multimodal_projector_bias", "biases in some of the projector's linears are not supported")
    return chain(name, vision, projector_module(dims, merge=merge, norm="rms", norm_first=True, bias=False), llm)


def internvl(config: Fields, name: str) -> Model:
    """InternVL in files of transformers: image tokens joined (pixel shuffle); every tile counts as an image."""
    _one_layer(config)
    return _intern(config, name, tower_of(config), text_module(config, "text_config"))


def internvl_chat(config: Fields, name: str) -> Model:
    """Files of OpenGVLab: `llm_config` in place of `text_config`; InternLM2 fuses LLaMA's projections."""
    inner = config.part("llm_config", kind="llama")
    if inner.kind == "internlm2":
        biased = inner.flag("bias")
        inner = inner.read_as("llama")
        inner = replace(inner, values={**inner.values, "attention_bias": biased})
    known = replace(config, values={**config.values, "llm_config": {**inner.values, "model_type": inner.kind}})
    return _intern(known, name, tower_of(known, kind="intern_vit_6b"), text_module(known, "llm_config"))


def _intern(config: Fields, name: str, vision: ModelModule, llm: ModelModule) -> Model:
    ratio = config.get("downsample_ratio") or 0.5
    if not isinstance(ratio, float | int) or isinstance(ratio, bool) or ratio not in (0.5, 0.25, 1):
        raise config.error("downsample_ratio", f"expected 1, 0.5 or 0.25, found {shown(ratio)}")
    merge, width = round(1 / ratio) ** 2, llm.output_width
    return chain(
        name, vision, projector_module((vision.output_width * merge, width, width), merge=merge, norm="layer"), llm
    )


def llama4(config: Fields, name: str) -> Model:
    """Tokens joined 2 x 2, an adapter. A GELU stands behind the projector's linears but the last, as in the model."""
    vision, tower = tower_of(config), config.part("vision_config")
    given, taken = tower.count("projector_output_dim"), tower.count("vision_output_dim")
    if given != taken:
        message = f"the adapter gives projector_output_dim = {given}, the projector takes vision_output_dim = {taken}"
        raise tower.error("vision_output_dim", message)
    llm = text_module(config, "text_config")
    dims = (vision.output_width * 4, tower.count("projector_input_dim"), given, llm.output_width)
    return chain(name, vision, projector_module(dims, merge=4, bias=False), llm)


def mllama(config: Fields, name: str) -> Model:
    """Llama 3.2 Vision: the text model's cross layers read the projected image tokens. The projector also reads
    intermediate outputs of the tower, here the last one so often."""
    vision, tower = tower_of(config), config.part("vision_config")
    llm = text_module(config, "text_config", tied=False, rows=8)
    width, hidden = tower.count("vision_output_dim"), vision.output_width
    further = tower.get("intermediate_layers_indices")
    reads = 1 + (len(further) if isinstance(further, list) else 5)
    joined = hidden * reads
    if joined != width:
        raise tower.error("vision_output_dim", f"the projector reads {joined} numbers of a token, found {width}")
    return chain(name, vision, projector_module((hidden, llm.output_width), reads=reads), llm, last="cross_attention")


def kimi_k25(config: Fields, name: str) -> Model:
    vision, tower = tower_of(config, kind="kimi_k25_vision"), config.part("vision_config", kind="kimi_k25_vision")
    llm = text_module(config, "text_config")
    kernel = tower.numbers("merge_kernel_size", count=2, most=100)
    width = config.optional("projection_hidden_size")
    if width not in (None, vision.output_width):
        message = f"expected the tower's width {vision.output_width}, found {width}"
        raise config.error("projection_hidden_size", message)
    merge = kernel[0] * kernel[1]
    joined = vision.output_width * merge
    return chain(
        name,
        vision,
        projector_module((joined, joined, llm.output_width), merge=merge, norm="layer", norm_first=True),
        llm,
    )


def glm4v(config: Fields, name: str) -> Model:
    """GLM-4V to 5.3 and GLM-OCR: tokens joined 2 x 2 by a linear, a second one, a layer norm, a gated MLP. The first
    linear's bias and the layer norm are stored."""
    vision, tower = tower_of(config), config.part("vision_config")
    llm = text_module(config, "text_config", flat=config.kind == "glm5_next")
    merge, width = tower.count("spatial_merge_size", most=100) ** 2, tower.count("out_hidden_size")
    inner = tower.count("intermediate_size")
    if tower.kind == "glm_ocr_vision":
        inner = width * tower.count("in_channels", most=1_000)
    if tower.kind == "glm5_next_vision":
        inner = tower.count("projection_intermediate_size")
    dims = (vision.output_width * merge, width, width, inner, width)
    return chain(name, vision, projector_module(dims, merge=merge, gated=True, bias=False, stored=3 * width), llm)


def janus(config: Fields, name: str) -> Model:
    """The side that understands images; the side that draws them is left out."""
    vision, tower = tower_of(config), config.part("vision_config")
    width, llm = tower.count("projection_dim"), text_module(config, "text_config")
    depth = tower.count("depth", most=100)
    config.log.notes.append(
        "the side that draws images (vqmodel, generation_embeddings, generation_aligner, generation_head) is left out"
    )
    return chain(name, vision, projector_module((vision.output_width, *(width,) * depth)), llm)


def two_linears(config: Fields, name: str) -> Model:
    """DeepSeek-VL and VideoLLaMA 3."""
    vision, llm = tower_of(config), text_module(config, "text_config")
    return chain(name, vision, projector_module((vision.output_width, llm.output_width, llm.output_width)), llm)


def paddle(config: Fields, name: str) -> Model:
    vision, tower = tower_of(config), config.part("vision_config")
    llm = text_module(config, "text_config")
    merge = tower.count("spatial_merge_size", most=100) ** 2
    joined = vision.output_width * merge
    projector = projector_module((joined, joined, llm.output_width), merge=merge, norm="layer", norm_first=True)
    return chain(name, vision, projector, llm)


def ovis2(config: Fields, name: str) -> Model:
    """Tokens become probabilities of visual words, whose embeddings they average: two products without bias."""
    vision, tower = tower_of(config), config.part("vision_config")
    llm = text_module(config, "text_config")
    stride = tower.count("hidden_stride", most=100) ** 2
    words = tower.count("vocab_size") - tower.count("num_visual_indicator_tokens", least=0)
    if words < 1:
        raise tower.error("vocab_size", f"{words} visual words are left beside the indicator tokens")
    width = config.count("hidden_size")
    indicators = tower.count("num_visual_indicator_tokens", least=0) * width
    dims = (vision.output_width * stride, words, width)
    return chain(name, vision, projector_module(dims, merge=stride, bias=False, stored=2 * words + indicators), llm)


def qwen_vl(config: Fields, name: str) -> Model:
    """Qwen2-VL, Qwen2.5-VL, EXAONE 4.5: the merger joins 2 x 2 patches."""
    vision, tower = tower_of(config), config.part("vision_config")
    norm, width = ("layer", "hidden_size") if tower.kind == "qwen2_vl_vision" else ("rms", "out_hidden_size")
    llm = text_module(config, "text_config", flat=True)
    projector = merger_module(tower, vision.output_width, tower.count(width), norm)  # type: ignore[arg-type]
    return chain(name, vision, projector, llm)
