"""What vision towers are made of: blocks of a vision transformer, images of one size or of any."""

from typing import Any

from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import SOURCE, divided
from mmplan.scenario.scenario import ModelModule, Transformer, VisionInput
from mmplan.scenario.steps import Form, Kept, Steps

BIASES: dict[str, Any] = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
POST: dict[str, Any] = {"pre_norms": False, "post_norms": True, "final_norm": False}  # norms behind the branches
UNBIASED_GATED: dict[str, Any] = {
    "norm": "rms",
    "gated_mlp": True,
    "activation": "silu",
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
}
RMS_GATED: dict[str, Any] = {"norm": "rms", "gated_mlp": True, "activation": "silu"}


def vision_module(shape: Transformer, vision: VisionInput, stored: int = 0) -> ModelModule:
    return ModelModule(
        name="vision",
        kind="vision_encoder",
        modality="vision",
        transformer=shape,
        vision=vision,
        stored=stored,
        source=SOURCE,
    )


def vit(
    tower: Fields,
    *,
    hidden: str = "hidden_size",
    heads: str = "num_attention_heads",
    layers: str = "num_hidden_layers",
    ffn: int | None = None,
    **shape: Any,
) -> Transformer:
    """Blocks of a vision transformer: layer norms, plain MLP and biases everywhere unless `shape` says otherwise."""
    width, count = tower.count(hidden), tower.count(heads)
    kv_heads = shape.pop("kv_heads", count)
    usual: dict[str, Any] = {"norm": "layer", "gated_mlp": False, **BIASES}
    return Transformer(
        layers=tower.layers(layers),
        hidden=width,
        heads=count,
        kv_heads=kv_heads,
        head_dim=shape.pop("head_dim", None) or divided(tower, width, count),
        ffn=tower.count("intermediate_size") if ffn is None else ffn,
        causal=False,
        **{**usual, **shape},
    )


def whole_patches(tower: Fields, patch: int, image: str = "image_size") -> int:
    """The image's side without the remainder that the patch convolution drops."""
    side = tower.side(image)
    if side < patch:
        raise tower.error(image, f"an image of {side} pixels has no patch of {patch}")
    return side // patch * patch


def fixed(
    tower: Fields, *, bias: bool = True, class_token: bool = False, channels: str = "num_channels"
) -> VisionInput:
    """Images of one size with a table of learned positions; without class token behind the tower."""
    patch = tower.side("patch_size")
    return VisionInput(
        patch=patch,
        channels=tower.count(channels, most=1_000),
        image_size=whole_patches(tower, patch),
        class_token=class_token,
        learned_positions=True,
        patch_bias=bias,
    )


def native(
    tower: Fields, *, bias: bool, rows: int = 0, channels: str = "in_channels", temporal: bool = True
) -> VisionInput:
    """Images of any size, with `rows` learned positions that are stretched over them."""
    return VisionInput(
        patch=tower.side("patch_size"),
        channels=tower.count(channels, most=1_000),
        temporal_patch=tower.side("temporal_patch_size") if temporal else 1,
        position_rows=rows,
        patch_bias=bias,
    )


def bare(width: int, front: Steps, raw_width: int) -> tuple[Transformer, Form]:
    """Of an encoder without blocks: what enters passes `front` alone."""
    shape = Transformer(
        layers=1,
        hidden=width,
        heads=1,
        kv_heads=1,
        head_dim=width,
        ffn=1,
        gated_mlp=False,
        causal=False,
        norm="layer",
        final_norm=False,
    )
    return shape, Form(front=front, raw_width=raw_width, blocks=((1, (Kept(size=0),)),))


def pooling_head(tower: Fields) -> int:
    """Parameters of attention from one learned query, a norm and an MLP."""
    width, ffn = tower.count("hidden_size"), tower.count("intermediate_size")
    return width + 4 * (width * width + width) + 2 * width + 2 * width * ffn + width + ffn
