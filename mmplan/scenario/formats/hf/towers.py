"""Vision towers that several families share."""

from dataclasses import replace
from typing import Any, Literal

from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import MAX_LAYERS, SOURCE, divided, vit_blocks
from mmplan.scenario.scenario import ModelModule, Transformer, VisionInput

# Class defaults of transformers 5.24.
SIGLIP: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
}
PIXTRAL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "patch_size": 16,
}


def vision_module(shape: Transformer, vision: VisionInput) -> ModelModule:
    return ModelModule(
        name="vision", kind="vision_encoder", modality="vision", transformer=shape, vision=vision, source=SOURCE
    )


def square(tower: Fields, name: str) -> int:
    """A side in pixels, given as a number or as two equal ones."""
    value = tower.get(name)
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        return replace(tower, values={**tower.values, name: value[0]}).count(name)
    return tower.count(name)


def activation_of(tower: Fields, default: str = "gelu") -> Literal["gelu", "silu"]:
    """`silu`, or `gelu` for all of its approximations."""
    return "silu" if (tower.get("hidden_act", "hidden_activation") or default) == "silu" else "gelu"


def siglip_module(tower: Fields) -> ModelModule:
    """SigLIP without pooling head: stored positions, no class token, a norm at the end."""
    return vision_module(
        vit_blocks(tower, tower.count("num_hidden_layers", most=MAX_LAYERS), first_norm=False),
        VisionInput(
            patch=square(tower, "patch_size"),
            channels=tower.count("num_channels"),
            image_size=_whole_patches(tower),
            learned_positions=True,
            patch_bias=True,
        ),
    )


def _whole_patches(tower: Fields) -> int:
    """The image's side without the remainder that the patch convolution drops."""
    patch = square(tower, "patch_size")
    return square(tower, "image_size") // patch * patch


def pixtral_module(tower: Fields) -> ModelModule:
    """Pixtral's tower: any size, rotary positions, gated MLP, RMS norms, one of them before the first block."""
    hidden, heads = tower.count("hidden_size"), tower.count("num_attention_heads")
    shape = Transformer(
        layers=tower.count("num_hidden_layers", most=MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(tower, hidden, heads),
        ffn=tower.count("intermediate_size"),
        gated_mlp=True,
        causal=False,
        norm="rms",
        activation=activation_of(tower),
        norm_first_extra=True,
        final_norm=False,
    )
    return vision_module(shape, VisionInput(patch=square(tower, "patch_size"), channels=tower.count("num_channels")))
