"""Convolutional towers with a module for each resolution: ResNet (arXiv 1512.03385), EfficientNet (arXiv 1905.11946).

Batch norms count as norms of rows. What a squeeze of a whole image to one row multiplies is kept and not counted.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from mmplan.scenario.formats.hf.resamplers import encoder_module
from mmplan.scenario.formats.hf.vit import bare, vision_module, whole_patches
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import ModelModule, VisionInput
from mmplan.scenario.steps import Active, Average, Dense, Fork, Form, Kept, Normed, Step, Steps, conv, residual

Stage = tuple[int, Steps, list[Steps]]  # width, steps that change the resolution, blocks


def resnet(fields: Fields, *, frozen: bool = False, name: str = "vision") -> tuple[ModelModule, ...]:
    """`frozen`: batch norms have no weights to train (DETR and its kin)."""
    widths, depths = fields.numbers("hidden_sizes"), fields.stages("depths", count=len(fields.numbers("hidden_sizes")))
    base, channels = fields.count("embedding_size"), fields.count("num_channels", most=1_000)
    deep = fields.word("layer_type", ("basic", "bottleneck")) == "bottleneck"
    first = fields.flag("downsample_in_first_stage")
    early = fields.flag("downsample_in_bottleneck")
    norm: Steps = () if frozen else (Normed(),)
    stages: list[Stage] = []
    before = base
    for index, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        stride = 2 if index or first else 1
        start: Steps = () if index else (conv(base, 7, stride=2, bias=False), *norm, Active(), Average(rows=4))
        start += _residual_of_resnet(fields, before, width, stride, norm, deep, early)
        stages.append((width, start, [_residual_of_resnet(fields, width, width, 1, norm, deep, early)] * (depth - 1)))
        before = width
    side = fields.side("image_size") if fields.get("image_size") is not None else None
    return staged(stages, patch=8 if first else 4, channels=channels, side=side, name=name)


def _residual_of_resnet(
    fields: Fields, inputs: int, width: int, stride: int, norm: Steps, deep: bool, early: bool
) -> Steps:
    shortcut: Steps = (conv(width, 1, stride=stride, bias=False), *norm) if stride > 1 or inputs != width else ()
    if not deep:
        inner: Steps = (conv(width, 3, stride=stride, bias=False), *norm, Active(), conv(width, 3, bias=False), *norm)
        return (Fork(left=shortcut, right=inner), Active())
    less = max(1, width // 4)
    inner = (
        *(conv(less, 1, stride=stride if early else 1, bias=False), *norm, Active()),
        *(conv(less, 3, stride=1 if early else stride, bias=False), *norm, Active()),
        *(conv(width, 1, bias=False), *norm),
    )
    return (Fork(left=shortcut, right=inner), Active())


def efficientnet(fields: Fields) -> tuple[ModelModule, ...]:
    """Inverted bottlenecks with a squeeze; widths and depths are those of the keys times two coefficients."""
    inputs = fields.numbers("in_channels")
    count = len(inputs)
    outputs, kernels = fields.numbers("out_channels", count=count), fields.numbers("kernel_sizes", count=count)
    strides, ratios = fields.numbers("strides", count=count), fields.numbers("expand_ratios", count=count)
    repeats = fields.numbers("num_block_repeats", count=count, most=100)
    if sum(repeats) * fields.ratio("depth_coefficient") > 2_000:
        raise fields.error(
            "num_block_repeats", f"expected at most 2,000 blocks, found {sum(repeats)} times depth_coefficient"
        )
    depth, squeezed = fields.ratio("depth_coefficient"), fields.ratio("squeeze_expansion_ratio")
    base = _filters(fields, 32)
    stem: Steps = (conv(base, 3, stride=2, bias=False), Normed(), Active(function="silu"))
    stages: list[Stage] = []
    for index in range(count):
        before, width = _filters(fields, inputs[index]), _filters(fields, outputs[index])
        kernel, ratio = kernels[index], ratios[index]
        first = _inverted(before, width, ratio, kernel, strides[index], max(1, int(before * squeezed)))
        again = (residual(*_inverted(width, width, ratio, kernel, 1, max(1, int(width * squeezed)))),)
        others: list[Steps] = [again] * (math.ceil(depth * repeats[index]) - 1)
        stages.append((width, first if index else (*stem, *first), others))
    side = whole_patches(fields, 2)
    return staged(stages, patch=2, channels=fields.count("num_channels", most=1_000), side=side)


def _filters(fields: Fields, channels: int) -> int:
    """Channels times a coefficient, to the nearest multiple of a divisor that loses less than a tenth."""
    unit, wanted = fields.count("depth_divisor", most=1_000), channels * fields.ratio("width_coefficient")
    width = max(unit, int(wanted + unit / 2) // unit * unit)
    return width + unit if width < 0.9 * wanted else width


def _inverted(inputs: int, width: int, ratio: int, kernel: int, stride: int, squeezed: int) -> Steps:
    inner = inputs * ratio
    wider: tuple[Step, ...] = (Dense(width=inner, bias=False), Normed(), Active(function="silu")) if ratio > 1 else ()
    return (
        *wider,
        *(conv(inner, kernel, stride=stride, groups=inner, bias=False), Normed(), Active(function="silu")),
        Kept(size=2 * inner * squeezed + inner + squeezed),
        *(Dense(width=width, bias=False), Normed()),
    )


def staged(
    stages: Sequence[Stage], *, patch: int, channels: int, side: int | None, name: str = "vision"
) -> tuple[ModelModule, ...]:
    """A module for each resolution, the first of which reads pixels."""
    modules: list[ModelModule] = []
    for index, (width, front, blocks) in enumerate(stages):
        steps = [*blocks] or [(Kept(size=0),)]
        shape = replace(bare(width, (), channels)[0], layers=len(steps))
        form = Form(front=front, raw_width=None if index else channels, blocks=tuple((1, block) for block in steps))
        if index:
            modules.append(encoder_module(shape, form, name=f"{name}_stage{index}"))
            continue
        seen = VisionInput(patch=patch, channels=channels, image_size=None if side is None else side // patch * patch)
        modules.append(replace(vision_module(shape, seen), form=form, name=name))
    return tuple(modules)
