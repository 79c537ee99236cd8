"""Muse Glimmer and Muse Spark: a tower whose blocks attend in windows but every fourth, 2 x 2 tokens joined, three
linears; Spark also listens, by depthwise convolutions over raw sound."""

from dataclasses import replace
from math import prod

from mmplan.scenario.formats.hf.blocks_by_layer import kinds_of_layers
from mmplan.scenario.formats.hf.ears import SAMPLES_PER_S, audio_module
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.vit import bare, vision_module, vit
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import merged, projector_module
from mmplan.scenario.scenario import AudioInput, Model, ModelModule, VisionInput
from mmplan.scenario.steps import Active, Convolve, Dense, Join, Normed, Steps, residual

RMS = Normed(kind="rms")


def glimmer(config: Fields, name: str) -> Model:
    llm = text_module(config, "text_config")
    return merged(name, llm, _seen(config, llm.output_width))


def spark(config: Fields, name: str) -> Model:
    llm = text_module(config, "text_config")
    audio = ear(config.part("audio_config"))
    return merged(name, llm, _seen(config, llm.output_width), (audio,))


def _seen(config: Fields, width: int) -> tuple[ModelModule, ModelModule]:
    fields = config.part("vision_config")
    tower = vision(fields)
    merge, inner = fields.count("merge_size", most=100) ** 2, config.count("projector_hidden_size")
    joined = config.count("out_hidden_size")
    if joined != merge * tower.output_width:
        message = (
            f"{merge} joined tokens of width {tower.output_width} are {merge * tower.output_width}, found {joined}"
        )
        raise config.error("out_hidden_size", message)
    return tower, projector_module((joined, inner, inner, width), name="vision_projector", merge=merge, bias=False)


def vision(fields: Fields) -> ModelModule:
    shape = vit(fields, norm_first_extra=True)
    known = ("full_attention", "window_attention")
    last = shape.layers - 1
    types = kinds_of_layers(fields, shape.layers, known, lambda i: known[(i + 1) % 4 > 0 and i < last])
    height, wide = fields.count("pos_emb_height"), fields.count("pos_emb_width")
    full = tuple(index for index, word in enumerate(types) if word == known[0])
    if len(full) < shape.layers:
        shape = replace(shape, window_tokens=height**2, global_layers=full)
    seen = VisionInput(
        patch=fields.side("patch_size"),
        temporal_patch=fields.count("patch_temporal", most=100),
        position_rows=height * wide,
    )
    return vision_module(shape, seen)


def ear(fields: Fields) -> ModelModule:
    """Linears over neighbouring rows, each followed by convolutions and MLPs."""
    sizes, widths = fields.numbers("patch_sizes", most=10_000), fields.numbers("hidden_sizes")
    depths, taps = fields.stages("depths", count=len(widths), most=1_000), fields.count("conv_kernel_size")
    times = fields.ratio("mlp_ratio")
    steps: Steps = ()
    for size, width, depth in zip(sizes, widths, depths, strict=True):
        mlp: Steps = (Dense(width=int(width * times)), Active(), Dense(width=width))
        block = residual(Convolve(width=width, taps=taps, groups=width), RMS, *mlp)
        steps += (Join(rows=size), Dense(width=width), RMS, *(block,) * depth)
    out = fields.count("out_hidden_size")
    shape, form = bare(out, (*steps, RMS, Dense(width=out), RMS), 1)
    entry = AudioInput(mel_bins=1, frames_per_s=SAMPLES_PER_S, pad_s=None, stride=prod(sizes))
    return replace(audio_module(shape, entry), form=form)
