"""Vision towers that Megatron's multimodal scripts name, with their projector."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmplan.scenario.formats.launch.facts import SetUp

# Sizes: Megatron-LM examples/multimodal/config.py (get_vision_model_config); config.json of each tower.
_TOWERS: Mapping[str, dict[str, Any]] = {
    "clip": {
        "layers": 24,
        "hidden": 1024,
        "heads": 16,
        "ffn": 4096,
        "patch": 14,
        "image_size": 336,
        "class_token": True,
        "learned_positions": True,
        "first_norm": True,
    },
    "siglip": {
        "layers": 27,
        "hidden": 1152,
        "heads": 16,
        "ffn": 4304,
        "patch": 14,
        "image_size": 384,
        "learned_positions": True,
        "patch_bias": True,
    },
    "internvit": {
        "layers": 45,
        "hidden": 3200,
        "heads": 25,
        "head_dim": 128,
        "ffn": 12800,
        "patch": 14,
        "image_size": 448,
        "norm": "rms",
        "qkv_bias": False,
        "class_token": True,
        "learned_positions": True,
        "patch_bias": True,
        "qk_norm": True,
        "qk_norm_whole": True,
        "layer_scale": True,
    },
    "internvit300m": {
        "layers": 24,
        "hidden": 1024,
        "heads": 16,
        "ffn": 4096,
        "patch": 14,
        "image_size": 448,
        "class_token": True,
        "learned_positions": True,
        "patch_bias": True,
        "layer_scale": True,
    },
    "radio": {
        "layers": 32,
        "hidden": 1280,
        "heads": 16,
        "ffn": 5120,
        "patch": 16,
        "image_size": 512,
        "class_token": True,
    },
    "radio-g": {
        "layers": 40,
        "hidden": 1536,
        "heads": 24,
        "ffn": 6144,
        "patch": 14,
        "image_size": 448,
        "class_token": True,
    },
}
_OTHER_NAMES = {
    "intern_300m": "internvit300m",
    "intern-300m": "internvit300m",
    "intern_6b": "internvit",
    "cradio-g": "radio-g",
}
# Inner width of the projector by language model (same file, get_vision_projection_config); else the model's width.
_PROJECTOR_WIDTHS = {
    "2b": 2048,
    "8b": 16384,
    "llama3_8b": 14336,
    "llama3.1_8b": 4096,
    "mistral_7b": 14336,
    "yi-34b": 20480,
    "llama3.1_70b": 29568,
    "qwen2.0_72b": 29568,
    "qwen2.5_7b": 3584,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """`vision` and `projector` of a scenario's modules, and what is told of them."""

    vision: dict[str, Any]
    projector: dict[str, Any]
    sentence: str
    warnings: tuple[str, ...] = ()


def tower_of(setup: SetUp, llm_width: int) -> Tower | None:
    """The tower that a file's vision arguments name; None for text models.

    Megatron's multimodal examples take CLIP where images are given and no type is.

    Raises:
        InputError: a size that is unreadable.
    """
    named = setup.text("vision_type")
    if named is None and not (setup.has("patch") and setup.has("image_size")):
        return None
    kind = _OTHER_NAMES.get((named or "clip").lower(), (named or "clip").lower())
    warnings: list[str] = []
    if kind not in _TOWERS:
        warnings.append(f"the sizes of the vision tower '{named}' are not known here: those of CLIP ViT-L/14 are taken")
        kind = "clip"
    tower = {"kind": "vision_encoder", **_TOWERS[kind]}
    for key in ("patch", "image_size"):
        if (value := setup.count(key, most=100_000)) is not None:
            tower[key] = value
    if tower["image_size"] < tower["patch"]:
        tower["patch"] = tower["image_size"]
    tiles = setup.count("tiles", most=1_000) or 1
    if tiles > 1:
        tower["tiles"] = tiles + setup.flag("thumbnail")
        warnings.append(f"images are priced as {tower['tiles']} tiles, the most that the file allows")
    merge = 4 if setup.flag("pixel_shuffle") else 1
    if tower.get("class_token") and merge == 1 and not setup.flag("drop_class_token"):
        tower["keep_class_token"] = True
    side = tower["image_size"] // tower["patch"]
    if merge == 4 and side % 2:
        warnings.append(f"{side} x {side} patches do not merge by 2 x 2")
        merge = 1
    width = tower["hidden"] * merge
    inner = _PROJECTOR_WIDTHS.get((setup.text("language_type") or "").lower(), llm_width)
    projector = {"kind": "projector", "dims": [width, inner, llm_width], "merge": merge}
    if merge == 1:
        del projector["merge"]
    place = setup.facts["vision_type"].place if named is not None else setup.facts["patch"].place
    sentence = (
        f"vision tower {kind}: {tower['layers']} layers of width {tower['hidden']}, {side} x {side} patches, projector "
        f"{width} -> {inner} -> {llm_width}, from {place}"
    )
    return Tower(vision=tower, projector=projector, sentence=sentence, warnings=tuple(warnings))
