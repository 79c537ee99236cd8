"""Codecs of sound: what turns samples into rows, as steps of the module that reads them, and how many numbers the way
back holds, which training does not run.

DAC (arXiv 2306.06546), EnCodec (arXiv 2210.13438), Mimi (arXiv 2410.00037), VibeVoice's tokenizers (arXiv 2508.19205).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from mmplan.scenario.formats.hf.ears import audio_module
from mmplan.scenario.formats.hf.vit import bare
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import divided
from mmplan.scenario.scenario import AudioInput, ModelModule, Transformer
from mmplan.scenario.steps import Active, Convolve, Dense, Fold, Fork, Form, Kept, Normed, Steps, numbers, residual


def snake(width: int) -> Steps:
    """A periodic activation with a learned period for each channel."""
    return (Kept(size=width), Active(function="sigmoid"))


def dac_encoder(fields: Fields) -> tuple[Steps, int]:
    """Steps from samples to rows, and samples of a row."""
    width, strides = fields.count("encoder_hidden_size"), fields.stages("downsampling_ratios", most=10_000)
    steps: Steps = (Convolve(width=width, taps=7),)
    for stride in strides:
        unit = residual(*snake(width), Convolve(width=width, taps=7), *snake(width), Dense(width=width))
        steps += (unit, unit, unit, *snake(width))
        width *= 2
        steps += (Convolve(width=width, taps=2 * stride, joins=stride),)
    return (*steps, *snake(width), Convolve(width=width, taps=3)), prod(strides)


NORMED = ("encodec", "wavtokenizer_encoder")  # their `norm_type` says how


class Seanet:
    """Convolutions of EnCodec and Mimi with recurrent layers between them; norms of weights are numbers alone."""

    def __init__(self, fields: Fields) -> None:
        ratios = fields.get("upsampling_ratios")
        self.ratios = (8, 6, 5, 4) if ratios is None else fields.stages("upsampling_ratios", most=10_000)
        self.width, self.hidden = fields.count("num_filters"), fields.count("hidden_size")
        self.taps = fields.count("kernel_size"), fields.count("residual_kernel_size"), fields.count("last_kernel_size")
        self.blocks, self.less = fields.count("num_residual_layers", most=100), fields.count("compress", most=10_000)
        self.shortcut = fields.flag("use_conv_shortcut")
        self.channels = fields.count("audio_channels", most=64)
        recurrent = fields.optional("num_lstm_layers", least=0) or 0
        self.norm = fields.word("norm_type", ("weight_norm", "time_group_norm")) if fields.kind in NORMED else None
        self.recurrent = recurrent

    def conv(self, width: int, taps: int, *, joins: int = 1, normed: int | None = None) -> Steps:
        """`normed`: rows of the matrix whose lengths are numbers of their own."""
        step = Convolve(width=width, taps=taps, joins=joins)
        if self.norm == "weight_norm":
            return (step, Kept(size=width if normed is None else normed))
        return (step, Normed()) if self.norm else (step,)

    def block(self, width: int) -> Steps:
        less = width // self.less
        inner: Steps = (Active(), *self.conv(less, self.taps[1]), Active(), *self.conv(width, 1))
        left = self.conv(width, 1) if self.shortcut else ()
        return (Fork(left=left, right=inner),) * self.blocks

    def over_time(self, width: int) -> Steps:
        """LSTMs of the four gates' products, priced as if all rows were known at once."""
        gates = Fork(left=(Dense(width=4 * width),), right=(Dense(width=4 * width),))
        layers: Steps = (gates, Active(function="sigmoid"), Fold(parts=4)) * self.recurrent
        return (residual(*layers),) if layers else ()

    def encoder(self) -> Steps:
        width = self.width
        steps = self.conv(width, self.taps[0])
        for ratio in reversed(self.ratios):
            steps += (*self.block(width), Active(), *self.conv(2 * width, 2 * ratio, joins=ratio))
            width *= 2
        return (*steps, *self.over_time(width), Active(), *self.conv(self.hidden, self.taps[2]))

    def decoder(self) -> Steps:
        width = self.width * 2 ** len(self.ratios)
        steps: Steps = (*self.conv(width, self.taps[0]), *self.over_time(width))
        for ratio in self.ratios:
            steps += (Active(), *self.conv(width // 2, 2 * ratio, normed=width), *self.block(width // 2))
            width //= 2
        return (*steps, Active(), *self.conv(self.channels, self.taps[2]))


def encodec(fields: Fields) -> int:
    """Numbers of EnCodec; its codes have none to train."""
    net = Seanet(fields)
    return numbers(net.encoder(), net.channels) + numbers(net.decoder(), net.hidden)


def wavtokenizer(fields: Fields) -> ModelModule:
    """WavTokenizer's encoder (arXiv 2408.16532): EnCodec's; the table of its codes is not trained."""
    net = Seanet(fields)
    shape, form = bare(net.hidden, net.encoder(), 1)
    rate = fields.count("sampling_rate", most=1_000_000)
    entry = AudioInput(mel_bins=1, frames_per_s=rate, pad_s=None, stride=prod(net.ratios))
    return _with_front(replace(audio_module(shape, entry), form=form), net.encoder(), net.channels, fields)


def mimi(fields: Fields) -> tuple[ModelModule, Steps]:
    """Mimi's encoder, and steps from its rows to halved ones of the width of codes, with the way back kept."""
    net, heads, bias = Seanet(fields), fields.count("num_attention_heads"), fields.flag("attention_bias")
    hidden, depth = net.hidden, fields.layers()
    ffn, window = fields.count("intermediate_size"), fields.optional("sliding_window", most=100_000_000)
    shape = Transformer(
        layers=depth,
        hidden=hidden,
        heads=heads,
        kv_heads=fields.optional("num_key_value_heads") or heads,
        head_dim=fields.optional("head_dim") or divided(fields, hidden, heads),
        ffn=ffn,
        gated_mlp=False,
        causal=True,
        norm="layer",
        layer_scale=True,
        final_norm=False,
        qkv_bias=bias,
        out_bias=bias,
        window_tokens=window,
        sliding=window is not None,
    )
    rate = fields.count("sampling_rate", most=1_000_000)
    entry = AudioInput(mel_bins=1, frames_per_s=rate, pad_s=None, stride=prod(net.ratios))
    audio = audio_module(shape, entry)
    audio = _with_front(audio, net.encoder(), net.channels, fields)
    across = (shape.heads + shape.kv_heads) * shape.head_dim
    block = 2 * hidden * across + bias * (2 * across) + 2 * hidden * ffn + 6 * hidden
    code = fields.count("vector_quantization_hidden_dimension")
    back = numbers(net.decoder(), hidden) + depth * block + 4 * hidden * hidden // fields.count("upsample_groups")
    halved: Steps = (Convolve(width=hidden, taps=4, bias=False, joins=2),)
    if code != hidden:  # of the first code and of the others, to it and back
        halved, back = (*halved, Dense(width=code, bias=False)), back + 3 * hidden * code
    return audio, (*halved, Kept(size=back))


def _with_front(module: ModelModule, front: Steps, channels: int, fields: Fields) -> ModelModule:
    if channels != 1:
        raise fields.error("audio_channels", f"expected 1, found {channels}: sounds of several channels are not read")
    return replace(module, form=replace(module.form or Form(), front=front, raw_width=1))


def tokenizer(fields: Fields, name: str, rate: int = 24_000) -> ModelModule:
    """VibeVoice's encoder: depthwise convolutions and MLPs at seven resolutions."""
    steps, width, strides = tokenizer_steps(fields)
    shape, form = bare(width, steps, 1)
    entry = AudioInput(mel_bins=1, frames_per_s=rate, pad_s=None, stride=prod(strides))
    return replace(audio_module(shape, entry), name=name, form=form)


def tokenizer_steps(fields: Fields) -> tuple[Steps, int, Sequence[int]]:
    widths, taps, strides, depths, times = _sizes(fields)
    steps: Steps = ()
    for index, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        stride = strides[index - 1] if index else 1
        steps += (Convolve(width=width, taps=2 * stride if index else taps, joins=stride),)
        steps += _mixing(width, taps, times) * depth
    hidden = fields.count("hidden_size")
    return (*steps, Convolve(width=hidden, taps=taps)), hidden, strides


def tokenizer_decoder(fields: Fields) -> int:
    """Numbers of the way back, whose convolutions are transposed."""
    widths, taps, strides, depths, times = _sizes(fields)
    steps: Steps = ()
    for index in reversed(range(len(widths))):
        kernel = taps if index + 1 == len(widths) else 2 * strides[index]
        steps += (Convolve(width=widths[index], taps=kernel), *_mixing(widths[index], taps, times) * depths[index])
    return numbers((*steps, Convolve(width=fields.count("channels", most=64), taps=taps)), fields.count("hidden_size"))


def _sizes(fields: Fields) -> tuple[list[int], int, tuple[int, ...], tuple[int, ...], int]:
    strides = fields.stages("downsampling_ratios", most=10_000)
    depths = fields.numbers("depths", count=len(strides) + 1, most=1_000)
    fields.refuse_unless("channels", 1, why="sounds of several channels are not read")
    width = fields.count("num_filters")
    widths = [width * 2**index for index in range(len(depths))]
    return widths, fields.count("kernel_size"), strides, depths, fields.count("ffn_expansion", most=1_000)


def _mixing(width: int, taps: int, times: int) -> Steps:
    rms, scale = Normed(kind="rms"), Kept(size=width)
    mlp: Steps = (Dense(width=times * width), Active(), Dense(width=width))
    return (residual(rms, Convolve(width=width, taps=taps, groups=width), scale), residual(rms, *mlp, scale))
