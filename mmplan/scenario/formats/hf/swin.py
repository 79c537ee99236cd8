"""Swin transformers (arXiv 2103.14030), a module for each resolution, and the families that see, read or listen with
them: Swin, Donut, Nougat, CLAP. Tables of relative positions are kept; their additions are not counted."""

from collections.abc import Callable
from dataclasses import replace

from mmplan.scenario.formats.hf.ears import FRAMES_PER_S, audio_module
from mmplan.scenario.formats.hf.pairs import bert_tower, pooler
from mmplan.scenario.formats.hf.resamplers import encoder_module
from mmplan.scenario.formats.hf.vit import BIASES, vision_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import apart, divided, projector_module
from mmplan.scenario.scenario import AudioInput, Model, ModelModule, Transformer, VisionInput
from mmplan.scenario.steps import Attend, Dense, Form, Join, Kept, Mlp, Normed, Steps, conv, residual


def swin(fields: Fields, *, norms_of: tuple[int, ...] = ()) -> tuple[ModelModule, ...]:
    """Stages of Swin or Donut's, which has no norm at its end. `norms_of`: stages that a backbone hands on, each behind
    a norm of its own in place of the last one."""
    patch, channels = fields.side("patch_size"), fields.count("num_channels", most=1_000)
    size = fields.get("image_size")
    if isinstance(size, list | tuple) and len(size) == 2 and size[0] != size[1]:
        fields.log.read.add(fields.key("image_size"))
        fields.log.notes.append(f"image_size = {size[0]} x {size[1]}: pages are priced at the sizes of the data")
        seen = VisionInput(patch=patch, channels=channels)
        patches = int(size[0]) // patch * (int(size[1]) // patch)
    else:
        side = fields.side("image_size")
        seen = VisionInput(patch=patch, channels=channels, image_size=side // patch * patch)
        patches = (side // patch) ** 2
    width = fields.count("embed_dim")
    placed = patches * width if fields.flag("use_absolute_embeddings") else 0
    front: Steps = (conv(width, patch, stride=patch), Normed())
    heads = fields.numbers("num_heads")
    ending = fields.kind != "donut-swin" and not norms_of
    return stages(
        fields, width, heads, front, channels, lambda shape: vision_module(shape, seen, placed), ending, norms_of
    )


def stages(
    fields: Fields,
    width: int,
    heads: tuple[int, ...],
    front: Steps,
    raw_width: int,
    enter: Callable[[Transformer], ModelModule],
    ending: bool,
    norms_of: tuple[int, ...] = (),
) -> tuple[ModelModule, ...]:
    """Blocks that attend in windows; in front of each further stage 2 x 2 rows become one of twice the width."""
    depths, window = fields.stages("depths", count=len(heads)), fields.count("window_size", most=10_000)
    modules: list[ModelModule] = []
    for index, (depth, count) in enumerate(zip(depths, heads, strict=True)):
        shape = Transformer(
            layers=depth,
            hidden=width,
            heads=count,
            kv_heads=count,
            head_dim=divided(fields, width, count),
            ffn=int(width * fields.ratio("mlp_ratio")),
            gated_mlp=False,
            causal=False,
            norm="layer",
            final_norm=False,
            window_tokens=window**2,
            **{**BIASES, "qkv_bias": fields.flag("qkv_bias")},
        )
        table = Kept(size=(2 * window - 1) ** 2 * count)
        block: Steps = (residual(Normed(), Attend()), residual(Normed(), Mlp()), table)
        last: Steps = (Normed(),) if ending and index + 1 == len(depths) else ()
        last += (Kept(size=2 * width),) if index in norms_of else ()
        blocks = ((depth - 1, block), (1, (*block, *last))) if depth > 1 else ((1, (*block, *last)),)
        if index:
            form = Form(front=(Join(rows=4), Normed(), Dense(width=width, bias=False)), blocks=blocks)
            modules.append(
                encoder_module(shape, form, name=f"{modules[0].name}_stage{index}", modality=modules[0].modality)
            )
        else:
            modules.append(replace(enter(shape), form=Form(front=front, raw_width=raw_width, blocks=blocks)))
        width *= 2
    return tuple(modules)


def htsat(ear: Fields) -> tuple[ModelModule, ...]:
    """CLAP's ear (arXiv 2202.00874): a spectrogram folded into a square, of whose patches four or so are a frame."""
    patch, width, side = ear.side("patch_size"), ear.count("patch_embeds_hidden_size"), ear.count("spec_size")
    bins, inputs = ear.count("num_mel_bins"), ear.count("patch_embed_input_channels", most=1_000)
    stride = ear.side("patch_stride")
    heads = ear.numbers("num_attention_heads")
    fused = ear.flag("enable_fusion")
    mapped = 4 if fused and ear.get("fusion_type") == "channel_map" else 1
    less = width // ear.count("aff_block_r", most=10_000)
    more = inputs * width * 3 * patch**2 + width + 2 * (2 * width * less + 3 * less + 3 * width) if fused else 0
    norm: Steps = (Normed(),) if ear.get("enable_patch_layer_norm") is not False else ()
    if stride**2 * FRAMES_PER_S * bins % stride**4 or side % stride:
        raise ear.error("patch_stride", f"{bins} bins are no whole number of patches of {stride} x {stride}")
    # a clip of (side / bins) * side frames has (side / stride)^2 patches
    frames = FRAMES_PER_S * bins // stride**2
    audio = AudioInput(mel_bins=stride**2, frames_per_s=frames, pad_s=(side // stride) ** 2 / frames, stride=1)
    front: Steps = (conv(width, patch, stride=stride), *norm)
    if patch != stride or inputs * mapped > 1:
        ear.log.notes.append("patches overlap or have several channels: they are priced as of one")
    kept = 2 * bins + more + (inputs * mapped - 1) * width * patch**2
    return stages(ear, width, heads, front, 1, lambda shape: audio_module(shape, audio, kept), True)


def clap(config: Fields, name: str) -> Model:
    """Two linears behind each encoder; two temperatures are stored."""
    fields = config.part("text_config")
    heard, text = htsat(config.part("audio_config")), bert_tower(fields, stored=pooler(fields.count("hidden_size")))
    config.part("audio_config").same("hidden_size", heard[-1].output_width, "the width of the last stage")
    width = config.count("projection_dim")
    dims = (heard[-1].output_width, width, width)
    ends = projector_module(dims, name="audio_projector", modality="audio")
    said = projector_module((text.output_width, width, width), name="text_projector", modality="text", stored=2)
    return apart(name, (*heard, ends), (text, said))


def alone(config: Fields, name: str) -> Model:
    """Swin by itself, with its pooler, which has no weights."""
    return apart(name, swin(config))
