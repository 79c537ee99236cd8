"""Families that write down or translate speech: SeamlessM4T (its side from speech to text), SpeechT5, Speech2Text,
Moonshine, Parakeet, wav2vec 2.0 BERT. Relative positions are kept; their products are not counted."""

from dataclasses import replace

from mmplan.scenario.formats.hf.conformers import conformer_shape, conformer_steps, convolution_steps, parakeet
from mmplan.scenario.formats.hf.decoders import decoder
from mmplan.scenario.formats.hf.ears import SAMPLES_PER_S, audio_module
from mmplan.scenario.formats.hf.resamplers import encoder_module
from mmplan.scenario.formats.hf.vit import BIASES, POST
from mmplan.scenario.formats.hf.waves import wav2vec
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import apart, chain, divided, stepping
from mmplan.scenario.scenario import AudioInput, Model, ModelModule, Transformer
from mmplan.scenario.steps import (
    Active,
    Attend,
    Average,
    Convolve,
    Dense,
    Fork,
    Form,
    Halve,
    Kept,
    Mlp,
    Normed,
    Steps,
    residual,
)


def conformer(ear: Fields, prefix: str = "") -> ModelModule:
    """wav2vec 2.0 BERT (arXiv 2312.05187): pairs of frames, conformer blocks."""
    width, pair = ear.count("hidden_size"), ear.count("feature_projection_input_dim")
    layers = f"{prefix}layers" if prefix else "num_hidden_layers"
    heads = f"{prefix}attention_heads" if prefix else "num_attention_heads"
    ffn = ear.count(f"{prefix}intermediate_size")
    shape = conformer_shape(ear, hidden="hidden_size", layers=layers, heads=heads, ffn=ffn, bias=True)
    taps = ear.count("conv_depthwise_kernel_size", most=10_000)
    placed = ear.get("position_embeddings_type")
    if placed == "relative":
        kept = width * width + 2 * width
    elif placed == "relative_key":
        kept = _rows(ear) * shape.head_dim
    else:
        ear.refuse_unless("position_embeddings_type", "rotary", None, why="its kind of positions is not read")
        kept = 0
    steps = conformer_steps(shape, convolution_steps(width, taps, bias=False, depthwise_bias=False), kept=kept)
    if pair % 2:
        raise ear.error("feature_projection_input_dim", f"{pair} numbers are not those of two frames")
    front: Steps = (Normed(), Dense(width=width))
    module = audio_module(shape, AudioInput(mel_bins=pair // 2, pad_s=None))
    return replace(module, form=Form(front=front, raw_width=pair, blocks=((shape.layers, steps),)))


def _rows(ear: Fields) -> int:
    sides = ("left_max_position_embeddings", "right_max_position_embeddings")
    return sum(ear.count(side, least=0, most=100_000) for side in sides) + 1


def wav2vec_bert(config: Fields, name: str) -> Model:
    config.refuse_unless("add_adapter", False, None, why="convolutions behind the encoder")
    masked = bool(config.get("mask_time_prob") or 0) or config.get("mask_time_prob") is None
    audio = conformer(config)
    return apart(name, (replace(audio, stored=audio.output_width if masked else 0),))


def seamless(config: Fields, name: str) -> Model:
    """A conformer, an MLP, blocks of convolutions of stride 8 and attention, and a decoder."""
    config.refuse_unless("add_adapter", True, None, why="the decoder reads the encoder itself")
    config.refuse_unless("tie_word_embeddings", True, None, why="a third table stands beside decoder and head")
    audio = conformer(config, "speech_encoder_")
    assert audio.transformer is not None
    width, ffn = audio.output_width, audio.transformer.ffn
    taps, stride = config.count("adaptor_kernel_size", most=10_000), config.count("adaptor_stride", most=1_000)
    heads = config.count("speech_encoder_attention_heads")
    shape = Transformer(
        layers=1,
        hidden=width,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(config, width, heads),
        ffn=ffn,
        gated_mlp=False,
        causal=False,
        norm="layer",
        final_norm=False,
        **BIASES,
    )
    less: Steps = (Normed(), Convolve(width=2 * width, taps=taps, joins=stride), Halve())
    block: Steps = (residual(Attend()), residual(Normed(), Mlp()))
    before: Steps = (Normed(), residual(Dense(width=ffn), Active(), Dense(width=width)))
    modules = [audio]
    count = config.count("num_adapter_layers", most=100)
    for index in range(count):
        front: Steps = (*(() if index else before), Fork(left=less, right=less))
        last: Steps = (*block, Normed()) if index + 1 == count else block
        form = Form(front=front, blocks=((1, last),))
        modules.append(encoder_module(shape, form, name=f"adapter{index}", modality="audio"))
    llm = _decoder(config, width, "decoder_attention_heads", "decoder_layers", "decoder_ffn_dim")
    config.log.notes.append("text encoder and speaking side (t2u, vocoder) are left out: they are trained alone")
    return chain(name, *modules, llm, last="cross_attention")


def _decoder(
    config: Fields, read: int, heads: str, layers: str, ffn: str, *, hidden: str = "hidden_size", after: bool = False
) -> ModelModule:
    tied = config.get("tie_word_embeddings") is not False
    shape = POST if after else {}
    return decoder(config, read, hidden=hidden, heads=heads, layers=layers, ffn=ffn, tied=tied, **shape)


def speecht5(config: Fields, name: str) -> Model:
    """wav2vec 2.0's convolutions, relative positions, a decoder: the side from speech to text."""
    keys = {
        "num_hidden_layers": config.layers("encoder_layers"),
        "num_attention_heads": config.count("encoder_attention_heads"),
        "intermediate_size": config.count("encoder_ffn_dim"),
    }
    audio = wav2vec(replace(config, values={**config.values, **keys}))
    assert audio.transformer is not None
    rows = 2 * config.count("encoder_max_relative_position", most=100_000)
    audio = replace(audio, stored=audio.stored + rows * audio.transformer.head_dim)
    heads, layers, ffn = "decoder_attention_heads", "decoder_layers", "decoder_ffn_dim"
    config.log.notes.append("the sides that read text and speak are left out")
    return chain(
        name, audio, _decoder(config, audio.output_width, heads, layers, ffn, after=True), last="cross_attention"
    )


def speech_to_text(config: Fields, name: str) -> Model:
    """Gated convolutions of stride 2 over frames, a transformer on either side (arXiv 2010.05171)."""
    width, heads, bins = (
        config.count("d_model"),
        config.count("encoder_attention_heads"),
        config.count("input_feat_per_channel"),
    )
    count = config.count("num_conv_layers", most=16)
    kernels, channels = config.numbers("conv_kernel_sizes", count=count), config.count("conv_channels")
    config.refuse_unless("input_channels", 1, why="sounds of several channels are not read")
    front: Steps = ()
    for index, taps in enumerate(kernels):
        wide = 2 * width if index + 1 == count else channels
        front += (Convolve(width=wide, taps=taps, joins=2), Halve())
    shape = Transformer(
        layers=config.layers("encoder_layers"),
        hidden=width,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(config, width, heads),
        ffn=config.count("encoder_ffn_dim"),
        gated_mlp=False,
        causal=False,
        norm="layer",
        **BIASES,
    )
    audio = audio_module(shape, AudioInput(mel_bins=bins, pad_s=None, stride=2**count))
    audio = replace(audio, form=Form(front=front, raw_width=bins))
    heads_of, layers, ffn = "decoder_attention_heads", "decoder_layers", "decoder_ffn_dim"
    return chain(name, audio, _decoder(config, width, heads_of, layers, ffn, hidden="d_model"), last="cross_attention")


def moonshine(config: Fields, name: str) -> Model:
    """Three convolutions over samples; norms without shifts, a gated MLP in the decoder alone (arXiv 2410.15608)."""
    width, ffn, bias = config.count("hidden_size"), config.count("intermediate_size"), config.flag("attention_bias")
    config.refuse_unless("pad_head_dim_to_multiple_of", None, why="heads are filled up")
    heads = config.count("encoder_num_attention_heads")
    shape = Transformer(
        layers=config.layers("encoder_num_hidden_layers"),
        hidden=width,
        heads=heads,
        kv_heads=config.optional("encoder_num_key_value_heads") or heads,
        head_dim=divided(config, width, heads),
        ffn=ffn,
        gated_mlp=False,
        causal=False,
        norm="layer",
        norm_bias=False,
        qkv_bias=bias,
        mlp_bias=True,
    )
    front: Steps = (
        *(Convolve(width=width, taps=127, bias=False, joins=64), Active(), Normed()),
        *(Convolve(width=2 * width, taps=7, joins=3), Active(), Convolve(width=width, taps=3, joins=2), Active()),
    )
    audio = audio_module(shape, AudioInput(mel_bins=1, frames_per_s=SAMPLES_PER_S, pad_s=None, stride=384))
    audio = replace(audio, form=Form(front=front, raw_width=1))
    llm = decoder(
        config,
        width,
        heads="decoder_num_attention_heads",
        layers="decoder_num_hidden_layers",
        kv_heads=config.optional("decoder_num_key_value_heads") or config.count("decoder_num_attention_heads"),
        tied=config.get("tie_word_embeddings") is not False,
        qkv_bias=bias,
        out_bias=False,
        mlp_bias=True,
        gated_mlp=True,
        norm_bias=False,
    )
    return chain(name, audio, llm, last="cross_attention")


def parakeet_head(config: Fields, name: str) -> Model:
    """A FastConformer, and a head over characters; a recurrent network over those before, where there is one, is kept
    and its head priced on the encoder's rows."""
    audio, size = parakeet(config.part("encoder_config")), config.count("vocab_size")
    if config.kind == "parakeet_ctc":
        steps: Steps = (Dense(width=size),)
    else:
        inner, layers = config.count("decoder_hidden_size"), config.layers("num_decoder_layers")
        durations = config.get("durations") if config.kind == "parakeet_tdt" else None
        size_of = size * inner + layers * 8 * inner * (inner + 1) + inner * (inner + 1)
        size += len(durations) if isinstance(durations, list | tuple) else 0
        steps = (Dense(width=inner), Kept(size=size_of), Active(), Dense(width=size))
        if config.kind == "nemotron3_5_asr":  # a language among so many beside each row, in front
            asked, hidden = config.count("prompt_intermediate_size"), audio.output_width
            kept = Kept(size=config.count("num_prompts", most=100_000) * asked)
            steps = (Dense(width=asked), kept, Active(), Dense(width=hidden), *steps)
    last = replace(stepping(steps, (audio.output_width, size), name="head"), modality="audio")
    return apart(name, (audio, last))


def lasr(config: Fields, name: str) -> Model:
    """LASR: conformer blocks without biases behind two convolutions that halve frames, and a head over words."""
    ear = config.part("encoder_config")
    width, ffn = ear.count("hidden_size"), ear.count("intermediate_size")
    bias, convolved = ear.flag("attention_bias"), ear.flag("convolution_bias")
    if bias or convolved:
        raise ear.error("attention_bias", "true is not supported: biases of this class are not read")
    names = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
    shape = replace(conformer_shape(ear, **names, ffn=ffn, bias=False, norm="rms"), final_norm=True)
    convolution = convolution_steps(width, ear.count("conv_kernel_size", most=10_000), bias=False, depthwise_bias=False)
    taps, stride = ear.count("subsampling_conv_kernel_size", most=999), ear.count("subsampling_conv_stride", most=64)
    slim, bins = ear.count("subsampling_conv_channels"), ear.count("num_mel_bins", most=100_000)
    front: Steps = (
        *(Dense(width=width), Active(), Convolve(width=width, taps=taps, joins=stride), Active()),
        *(Convolve(width=slim, taps=taps, joins=stride), Active(), Dense(width=width)),
    )
    form = Form(front=front, raw_width=bins, blocks=((shape.layers, conformer_steps(shape, convolution)),))
    audio = replace(audio_module(shape, AudioInput(mel_bins=bins, pad_s=None, stride=stride**2)), form=form)
    size = config.count("vocab_size")
    head = replace(stepping((Dense(width=size),), (width, size), name="head"), modality="audio")
    return apart(name, (audio, head))


def granite5(config: Fields, name: str) -> Model:
    """Granite Speech 5: conformer blocks of which some halve the rows on the way; the head is used in the middle too,
    where it is priced."""
    ear = config.part("encoder_config")
    width, layers = ear.count("hidden_size"), ear.layers()
    names = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
    shape = conformer_shape(ear, **names, ffn=ear.count("intermediate_size"), bias=True)
    shape = replace(shape, qkv_bias=False, window_tokens=ear.count("context_size"))
    if not ear.flag("attention_bias"):
        shape = replace(shape, out_bias=False)
    inner = width * ear.count("conv_expansion_factor", most=100)
    taps, rows = ear.count("conv_kernel_size", most=10_000), 2 * ear.count("max_position_embeddings") + 1
    plain = convolution_steps(width, taps, inner=inner, bias=True, depthwise_bias=False)
    halving = tuple(replace(step, joins=2) if isinstance(step, Convolve) else step for step in plain)
    places, norm = Kept(size=rows * shape.head_dim), Normed()
    mlp: Steps = (norm, Dense(width=shape.ffn), Active(function="silu"), Dense(width=width))
    cut = (0, 1) if ear.get("subsample_layers") is None else ear.indices("subsample_layers", layers)
    size = config.count("vocab_size")
    middle: Steps = (residual(Dense(width=size), Active(), Dense(width=width)),)
    config.log.notes.append("the head is that of the middle of the encoder, and its product is counted there alone")
    bins = 2 * ear.count("num_mel_bins", most=100_000)  # with differences between frames
    front: Steps = (Dense(width=width),)
    modules: list[ModelModule] = []
    blocks: list[Steps] = []
    for layer in range(layers):
        behind = middle if layer + 1 == layers // 2 else ()
        if layer not in cut:
            blocks.append((*conformer_steps(shape, plain, kept=rows * shape.head_dim), *behind))
            continue
        blocks.append((residual(norm, Mlp()), residual(norm, Attend()), places))
        modules.append(_segment(shape, front, blocks, len(modules), bins))
        halved = Fork(left=(Average(rows=2),), right=(norm, *halving))
        front, blocks = (halved, residual(*mlp), norm, *behind), []
    modules.append(_segment(shape, front, blocks, len(modules), bins))
    return apart(name, tuple(modules))


def _segment(shape: Transformer, front: Steps, blocks: list[Steps], index: int, bins: int) -> ModelModule:
    """Blocks between two halvings; the first ones read pairs of frames."""
    form = Form(front=front, blocks=tuple((1, steps) for steps in blocks or [(Kept(size=0),)]))
    shape = replace(shape, layers=max(1, len(blocks)))
    if index:
        return encoder_module(shape, form, name=f"audio_stage{index}", modality="audio")
    return replace(audio_module(shape, AudioInput(mel_bins=bins, pad_s=None)), form=replace(form, raw_width=2 * bins))
