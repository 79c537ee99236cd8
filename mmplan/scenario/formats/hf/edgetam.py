"""EdgeTAM (arXiv 2501.07256): SAM 2's decoders behind RepViT (arXiv 2307.09283), whose sizes a name of timm tells."""

from collections.abc import Mapping
from dataclasses import replace

from mmplan.scenario.document import shown
from mmplan.scenario.formats.hf.resamplers import encoder_module
from mmplan.scenario.formats.hf.sam_family import mask_decoder, of_stages, remembering
from mmplan.scenario.formats.hf.vit import bare, vision_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import stepping
from mmplan.scenario.scenario import Model, ModelModule, VisionInput
from mmplan.scenario.steps import Active, Convolve, Dense, Fork, Kept, Normed, Steps, conv, residual

SIDE = 1024  # pixels (configuration_edgetam.py)
# Widths, blocks, and whether a norm follows each branch of a mixer and not their sum (timm/models/repvit.py).
REPVIT: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], bool]] = {
    "repvit_m0_9": ((48, 96, 192, 384), (2, 2, 14, 2), False),
    "repvit_m1": ((48, 96, 192, 384), (2, 2, 14, 2), True),
    "repvit_m1_0": ((56, 112, 224, 448), (2, 2, 14, 2), False),
    "repvit_m1_1": ((64, 128, 256, 512), (2, 2, 12, 2), False),
    "repvit_m1_5": ((64, 128, 256, 512), (4, 4, 24, 4), False),
    "repvit_m2": ((64, 128, 256, 512), (2, 2, 12, 2), True),
    "repvit_m2_3": ((80, 160, 320, 640), (6, 6, 34, 2), False),
    "repvit_m3": ((64, 128, 256, 512), (4, 4, 18, 2), True),
}


def image(config: Fields, name: str) -> Model:
    stages, necks, width = seen(config.part("vision_config"))
    return of_stages(name, stages, necks, *mask_decoder(config, width, width))


def video(config: Fields, name: str) -> Model:
    """Rows of memory pass a perceiver, which is kept as all that works on single objects."""
    stages, necks, width = seen(config.part("vision_config"))
    ffn = config.count("memory_attention_mlp_hidden_size")
    as_sam2 = replace(config, values={**config.values, "memory_attention_feed_forward_hidden_size": ffn})
    memory, more = remembering(as_sam2, width)
    more += _perceiver(config)
    return of_stages(name, stages, necks, *mask_decoder(config, width, width + more), memory)


def vision_alone(config: Fields, name: str) -> Model:
    stages, necks, _ = seen(config)
    return of_stages(name, stages, necks)


def seen(fields: Fields) -> tuple[tuple[ModelModule, ...], tuple[ModelModule, ...], int]:
    """RepViT and a linear behind each of its resolutions."""
    stages, width = repvit(fields.part("backbone_config")), fields.count("fpn_hidden_size")
    widths = [stage.output_width for stage in reversed(stages)]
    listed = fields.get("backbone_channel_list")
    if listed is not None and listed != widths:
        raise fields.error("backbone_channel_list", f"expected {widths}, the tower's widths, found {listed!r:.60}")
    side = fields.count("fpn_kernel_size", most=99)
    necks = tuple(
        stepping((conv(width, side),), (stage.output_width, width), name=f"vision_neck{index}")
        for index, stage in enumerate(stages)
    )
    return stages, necks, width


def repvit(fields: Fields) -> tuple[ModelModule, ...]:
    """Four resolutions of depthwise convolutions and linears, all with norms; scales of pooled rows are kept."""
    given = fields.get("architecture")
    found = given.removeprefix("timm/").split(".")[0] if isinstance(given, str) else ""
    if found not in REPVIT:
        known = ", ".join(f"'{one}'" for one in REPVIT)
        raise fields.error("architecture", f"expected a RepViT of timm ({known}), found {shown(given)}")
    widths, depths, legacy = REPVIT[found]
    stages: list[ModelModule] = []
    for index, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        steps: Steps = (*_normed(width // 2, 9, joins=4), Active(), *_normed(width, 9, joins=4))
        if index:
            before = widths[index - 1]
            steps = (*_block(before, legacy, scaled=False), *_normed(before, 9, joins=4, groups=before))
            steps += (*_normed(width, 1), residual(*_mlp(width)))
        for number in range(depth):
            steps += _block(width, legacy, scaled=number % 2 == 0)
        shape, form = bare(width, steps, 3)
        if index:
            stages.append(encoder_module(shape, replace(form, raw_width=None), name=f"vision_stage{index}"))
        else:
            stages.append(replace(vision_module(shape, VisionInput(patch=4, image_size=SIDE)), form=form))
    return tuple(stages)


def _normed(width: int, taps: int, *, joins: int = 1, groups: int = 1) -> Steps:
    return (Convolve(width=width, taps=taps, groups=groups, joins=joins, bias=False), Normed())


def _mlp(width: int) -> Steps:
    return (Dense(width=2 * width, bias=False), Normed(), Active(), Dense(width=width, bias=False), Normed())


def _block(width: int, legacy: bool, *, scaled: bool) -> Steps:
    single = Convolve(width=width, taps=1, groups=width, bias=not legacy)
    near = Fork(left=_normed(width, 9, groups=width), right=(single, *((Normed(),) if legacy else ())))
    less = max(8, int(width / 4 + 4) // 8 * 8)  # `make_divisible` of timm
    pooled: Steps = (Kept(size=2 * width * less + less + width),) if scaled else ()
    return (residual(near), *(() if legacy else (Normed(),)), *pooled, residual(*_mlp(width)))


def _perceiver(config: Fields) -> int:
    width, ffn = (config.count(f"perceiver_resampler_{key}") for key in ("hidden_size", "mlp_intermediate_size"))
    heads, head = (config.count(f"perceiver_resampler_{key}") for key in ("num_attention_heads", "attention_head_dim"))
    rows = sum(config.count(f"perceiver_resampler_{key}", least=0) for key in ("num_latents", "num_latents_2d"))
    layer = 8 * width * heads * head + 4 * width * ffn + 10 * width
    return rows * width + config.layers("perceiver_resampler_num_layers") * layer + 2 * width
