"""Audio encoders whose blocks hold a convolution between attention and MLPs (Conformer, arXiv 2005.08100).

Biases and positions that attention reads beside keys are kept as numbers; their products are not counted.
"""

from collections.abc import Callable
from dataclasses import replace

from mmplan.scenario.formats.hf.ears import audio_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import divided
from mmplan.scenario.scenario import AudioInput, ModelModule, Transformer
from mmplan.scenario.steps import (
    Active,
    Attend,
    Convolve,
    Dense,
    Form,
    Halve,
    Join,
    Kept,
    Mlp,
    Normed,
    Steps,
    residual,
)


def conformer_steps(shape: Transformer, convolution: Steps, *, kept: int = 0, last_norm: bool = True) -> Steps:
    """MLP, attention, convolution, MLP, each behind a norm and added to its input; one norm behind all."""
    norm = Normed(kind=shape.norm)
    steps: Steps = (
        residual(norm, Mlp()),
        residual(norm, Attend()),
        residual(norm, *convolution),
        residual(norm, Mlp()),
    )
    return (*steps, *((norm,) if last_norm else ()), *((Kept(size=kept),) if kept else ()))


def convolution_steps(hidden: int, kernel: int, *, inner: int | None = None, bias: bool, depthwise_bias: bool) -> Steps:
    """A linear to two halves of which one gates the other, a depthwise convolution, a norm, SiLU, a linear."""
    inner = inner or hidden
    return (
        Dense(width=2 * inner, bias=bias),
        Halve(),
        Convolve(width=inner, taps=kernel, groups=inner, bias=depthwise_bias),
        Normed(),
        Active(function="silu"),
        Dense(width=hidden, bias=bias),
    )


def striding(
    channels: int,
    bins: int,
    hidden: int,
    halvings: int,
    *,
    kernel: int = 3,
    bias: bool = True,
    causal: bool = False,
) -> Steps:
    """Convolutions that halve frames and bins: one from the spectrogram, then pairs of a depthwise and a plain one; a
    linear joins what is left of the bins. `causal` ones are filled up on both sides and leave one bin more."""
    taps, left = kernel**2, bins
    steps: list[Convolve | Active | Join | Dense] = []
    for index in range(halvings):
        groups = channels if index else 1
        steps.append(Convolve(width=channels, taps=taps, groups=groups, bias=bias, joins=4))
        if index:
            steps.append(Convolve(width=channels, taps=1, bias=bias))
        steps.append(Active(function="gelu"))
        left = left // 2 + 1 if causal else -(-left // 2)
    return (*steps, Join(rows=max(1, left)), Dense(width=hidden))


def conformer_shape(
    ear: Fields, *, hidden: str, layers: str, heads: str, ffn: int, bias: bool, norm: str = "layer"
) -> Transformer:
    width, count = ear.count(hidden), ear.count(heads)
    return Transformer(
        layers=ear.layers(layers),
        hidden=width,
        heads=count,
        kv_heads=count,
        head_dim=divided(ear, width, count),
        ffn=ffn,
        gated_mlp=False,
        activation="silu",
        causal=False,
        norm="rms" if norm == "rms" else "layer",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        final_norm=False,
    )


def granite(ear: Fields) -> ModelModule:
    """Granite Speech: pairs of frames, attention in blocks; a head for characters is used in the middle and stored."""
    hidden, inner = ear.count("hidden_dim"), ear.count("hidden_dim") * ear.count("conv_expansion_factor", most=100)
    head = ear.optional("dim_head") or divided(ear, hidden, ear.count("num_heads"))
    rows = 2 * ear.count("max_pos_emb") + 1
    ffn = hidden * ear.count("feedforward_mult", most=100)
    shape = conformer_shape(ear, hidden="hidden_dim", layers="num_layers", heads="num_heads", ffn=ffn, bias=True)
    shape = replace(shape, head_dim=head, qkv_bias=False, window_tokens=ear.count("context_size"))
    convolution = convolution_steps(hidden, ear.count("conv_kernel_size"), inner=inner, bias=True, depthwise_bias=False)
    width, words = ear.count("input_dim"), ear.count("output_dim")
    form = Form(
        front=(Dense(width=hidden),),
        raw_width=width,
        blocks=((shape.layers, conformer_steps(shape, convolution, kept=rows * head)),),
    )
    if width % 2:
        raise ear.error("input_dim", f"{width} numbers are not those of two frames")
    audio = AudioInput(mel_bins=width // 2, pad_s=None)
    stored = 2 * hidden * words + hidden + words
    return replace(audio_module(shape, audio, stored), form=form)


def parakeet(ear: Fields) -> ModelModule:
    """NVIDIA's FastConformer (arXiv 2305.05084): eightfold striding, relative positions."""
    hidden, bias = ear.count("hidden_size"), ear.flag("attention_bias")
    factor, bins = ear.count("subsampling_factor", most=64), ear.count("num_mel_bins")
    ear.refuse_unless("subsampling_conv_stride", 2, why="convolutions that halve frames and bins are read")
    shape = conformer_shape(
        ear,
        hidden="hidden_size",
        layers="num_hidden_layers",
        heads="num_attention_heads",
        ffn=ear.count("intermediate_size"),
        bias=bias,
    )
    convolved = ear.flag("convolution_bias")
    convolution = convolution_steps(hidden, ear.count("conv_kernel_size"), bias=convolved, depthwise_bias=convolved)
    channels, kernel = ear.count("subsampling_conv_channels"), ear.count("subsampling_conv_kernel_size", most=99)
    streams = ear.kind == "nemotron_asr_streaming_encoder"
    if streams:
        shape = replace(shape, window_tokens=ear.count("sliding_window", most=100_000))
    form = Form(
        front=striding(channels, bins, hidden, factor.bit_length() - 1, kernel=kernel, causal=streams),
        raw_width=1,
        blocks=((shape.layers, conformer_steps(shape, convolution, kept=hidden * hidden + 2 * hidden)),),
    )
    return replace(audio_module(shape, AudioInput(mel_bins=bins, pad_s=None, stride=factor)), form=form)


def phi4(ear: Fields) -> ModelModule:
    """Phi-4-multimodal: gated MLPs, a gated pointwise pair around the depthwise convolution, a table of biases."""
    hidden, ffn, out = ear.count("hidden_size"), ear.count("intermediate_size"), ear.count("ext_pw_out_channel")
    shape = conformer_shape(
        ear, hidden="hidden_size", layers="num_blocks", heads="num_attention_heads", ffn=ffn, bias=True
    )
    shape = replace(shape, gated_mlp=True)
    wide = hidden * ear.count("depthwise_multiplier", most=100)
    separable = ear.count("depthwise_separable_out_channel")
    if {wide, separable, out} != {hidden}:
        message = f"the branch of convolutions gives {separable} and {out} columns, the block has {hidden}"
        raise ear.error("ext_pw_out_channel", message)
    convolution: Steps = (
        Dense(width=2 * out),
        Halve(function="silu"),
        Kept(size=2 * out),
        Convolve(width=wide, taps=ear.count("kernel_size", most=10_000), groups=hidden),
        Dense(width=separable),
        Active(function="silu"),
        Dense(width=out),
    )
    channels, bins = ear.count("nemo_conv_channels"), ear.count("input_size")
    factor, left = ear.count("time_reduction", most=64), ear.optional("nemo_final_size")
    front = striding(channels, bins, hidden, factor.bit_length() - 1)
    expected = next(step.rows for step in front if isinstance(step, Join))
    if left not in (None, expected):
        raise ear.error("nemo_final_size", f"{bins} bins become {expected} behind the convolutions, found {left}")
    rows = ear.count("bias_max_distance") * (1 if ear.flag("bias_symmetric") else 2)
    steps = conformer_steps(shape, convolution)
    form = Form(front=front, raw_width=1, blocks=((shape.layers, steps),))
    audio = AudioInput(mel_bins=bins, pad_s=None, stride=factor)
    return replace(audio_module(shape, audio, rows * shape.heads), form=form)


CONFORMERS: dict[str, Callable[[Fields], ModelModule]] = {
    "granite_speech_encoder": granite,
    "parakeet_encoder": parakeet,
    "phi4_multimodal_audio": phi4,
}
