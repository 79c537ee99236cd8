"""MobileNet V5 as timm builds `mobilenetv5_300m_enc` (timm/models/mobilenetv5.py): Gemma 3n's eyes.

Each resolution is a module of its own. Batch norms are RMS norms there.
"""

from mmplan.scenario.formats.hf.resamplers import encoder_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import SOURCE, stepping
from mmplan.scenario.scenario import ModelModule, Transformer, VisionInput
from mmplan.scenario.steps import Active, Attend, Average, Convolve, Form, Kept, Normed, Steps, conv, residual

RMS = Normed(kind="rms")
SIDE = 768  # pixels (google/gemma-3n-E4B-it, preprocessor_config.json)


def tower(fields: Fields) -> tuple[ModelModule, ...]:
    """The four resolutions and what joins the last two."""
    fields.refuse_unless(
        "architecture", "mobilenetv5_300m_enc", why="the sizes of this tower of timm are not known here"
    )
    first = Form(
        front=(conv(64, 3, stride=2), RMS, Active(), *_fused(64, 128, 4, stride=2)),
        raw_width=3,
        blocks=((2, (residual(*_fused(128, 128, 4)),)),),
    )
    vision = ModelModule(
        name="vision",
        kind="vision_encoder",
        modality="vision",
        transformer=_shape(128, 2, 1, 128),
        vision=VisionInput(patch=4, image_size=SIDE),
        form=first,
        source=SOURCE,
    )
    second = Form(
        front=_inverted(128, 256, 768, first=3, middle=5),
        blocks=tuple((1, _kept(256, _inverted(256, 256, 1024, first=side))) for side in (5, 3, 5, 3)),
    )
    shrinking: Steps = (residual(RMS, Attend(), Kept(size=640 + 2 * (9 * 640 + 640))),)
    third = Form(
        front=_inverted(256, 640, 1536, first=5, middle=5),
        blocks=(
            (7, _kept(640, _inverted(640, 640, 2560, first=5))),
            (1, _kept(640, _inverted(640, 640, 640))),
            *((1, shrinking), (1, _kept(640, _inverted(640, 640, 1280)))) * 14,
        ),
    )
    attending: Steps = (residual(RMS, Attend(), Kept(size=1280)),)
    fourth = Form(
        front=_inverted(640, 1280, 3840, first=5, middle=5),
        blocks=((1, attending), (1, _kept(1280, _inverted(1280, 1280, 2560)))) * 19,
    )
    joined: Steps = (
        # of the two resolutions side by side the wider one; the product of the other's 640 columns is not counted
        Convolve(width=3840, taps=1, bias=False, spreads=4),
        Kept(size=640 * 3840),
        RMS,
        Active(),
        conv(2048, 1, bias=False),
        RMS,
        Average(rows=9),
        RMS,
    )
    return (
        vision,
        encoder_module(_shape(256, 4, 1, 256), second, name="vision_stage1"),
        # keys and values of a quarter of the tokens, as many products as in windows of a quarter
        encoder_module(_shape(640, 36, 12, 64, window=(SIDE // 16) ** 2 // 4), third, name="vision_stage2"),
        encoder_module(_shape(1280, 38, 16, 96), fourth, name="vision_stage3"),
        stepping(joined, (1280, 2048), name="vision_fusion"),
    )


def _shape(hidden: int, layers: int, heads: int, head_dim: int, window: int | None = None) -> Transformer:
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=1,
        head_dim=head_dim,
        ffn=1,
        gated_mlp=False,
        causal=False,
        norm="rms",
        final_norm=False,
        window_tokens=window,
    )


def _fused(inputs: int, width: int, expansion: int, stride: int = 1) -> Steps:
    """A plain convolution to more channels, then one of single pixels."""
    return (conv(inputs * expansion, 3, stride=stride, bias=False), RMS, Active(), conv(width, 1, bias=False), RMS)


def _inverted(inputs: int, width: int, inner: int, *, first: int = 0, middle: int = 0) -> Steps:
    """The universal inverted bottleneck: a depthwise convolution, more channels, a depthwise one of stride 2, fewer."""
    start: Steps = (conv(inputs, first, groups=inputs, bias=False), RMS) if first else ()
    between: Steps = (conv(inner, middle, stride=2, groups=inner, bias=False), RMS, Active()) if middle else ()
    last: Steps = (conv(width, 1, bias=False), RMS, *((Kept(size=width),) if middle else ()))
    return (*start, conv(inner, 1, bias=False), RMS, Active(), *between, *last)


def _kept(width: int, steps: Steps) -> Steps:
    """The same with a learned scale, added to its input."""
    return (residual(*steps, Kept(size=width)),)
