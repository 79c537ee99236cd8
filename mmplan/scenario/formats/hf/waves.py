"""Encoders that read raw sound: wav2vec 2.0 (arXiv 2006.11477) and its kin, and the families that listen with them or
with a conformer."""

from dataclasses import replace
from math import prod

from mmplan.scenario.formats.hf.conformers import parakeet
from mmplan.scenario.formats.hf.decoders import DECODERS, decoder
from mmplan.scenario.formats.hf.ears import SAMPLES_PER_S, audio_module, ear_of, whisper
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.vit import BIASES, POST
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import apart, chain, divided, edge, projector_module
from mmplan.scenario.scenario import AudioInput, Model, ModelModule, Transformer
from mmplan.scenario.steps import Active, Convolve, Dense, Form, Normed, Steps, residual


def wav2vec(ear: Fields) -> ModelModule:
    """Seven convolutions over samples, a linear, a convolution over positions, blocks with norms on either side. HuBERT
    has the same, WavLM relative positions besides, which are kept."""
    ear.refuse_unless("feat_proj_layer_norm", True, None, why="a linear without its norm")
    ear.refuse_unless("conv_pos_batch_norm", False, None, why="a norm in place of the scale of the positions")
    width, heads = ear.count("hidden_size"), ear.count("num_attention_heads")
    channels, kernels = ear.numbers("conv_dim"), ear.numbers("conv_kernel")
    strides = ear.numbers("conv_stride")
    if not len(channels) == len(kernels) == len(strides):
        counts = f"{len(channels)}, {len(kernels)} and {len(strides)}"
        raise ear.error("conv_dim", f"expected as many channels as kernels and strides, found {counts}")
    kin = ear.kind == "omniasr_audio"
    every = kin or ear.get("feat_extract_norm") == "layer"
    bias = ear.flag("conv_bias")
    front: Steps = ()
    for index, (channel, kernel, stride) in enumerate(zip(channels, kernels, strides, strict=True)):
        norm: Steps = (Normed(),) if every or index == 0 else ()
        front += (Convolve(width=channel, taps=kernel, bias=bias, joins=stride), *norm, Active())
    groups, taps = ear.count("num_conv_pos_embedding_groups"), ear.count("num_conv_pos_embeddings")
    placed = (Convolve(width=width, taps=taps, groups=groups), Active())
    front += (Normed(), Dense(width=width), residual(*placed))
    stable = kin or ear.flag("do_stable_layer_norm")
    shape = Transformer(
        layers=ear.layers(),
        hidden=width,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(ear, width, heads),
        ffn=ear.count("intermediate_size"),
        gated_mlp=False,
        causal=False,
        norm="layer",
        **BIASES,
        **({} if stable else {**POST, "final_norm": False}),
    )
    stored = 0
    if not kin:  # the scale of the positions' convolution, what stands for masked frames
        masked = bool(ear.get("mask_time_prob") or 0) or ear.get("mask_time_prob") is None
        stored = taps + (width if masked else 0)
    if ear.kind == "wavlm":  # gates of relative positions in each block, their table in the first
        stored += shape.layers * (heads + 8 * shape.head_dim + 8) + ear.count("num_buckets") * heads
    front += () if stable else (Normed(),)
    audio = AudioInput(mel_bins=1, frames_per_s=SAMPLES_PER_S, pad_s=None, stride=prod(strides))
    return replace(audio_module(shape, audio, stored), form=Form(front=front, raw_width=1))


def alone(config: Fields, name: str) -> Model:
    """One of them by itself, or the tower of OmniASR without a language model."""
    config.refuse_unless("add_adapter", False, None, why="convolutions behind the encoder")
    return apart(name, (wav2vec(config.part("audio_config") if config.kind == "omniasr_ctc" else config),))


def speech_encoder_decoder(config: Fields, name: str) -> Model:
    """wav2vec 2.0 and any decoder that is known alone; a linear between them where their widths differ."""
    ear, text = config.part("encoder"), config.part("decoder")
    if ear.kind not in ("wav2vec2", "hubert", "wavlm"):
        raise ear.error("model_type", f"expected 'wav2vec2', 'hubert' or 'wavlm', found '{ear.kind:.60}'")
    ear.refuse_unless("add_adapter", False, None, why="convolutions behind the encoder")
    if text.kind not in DECODERS:
        known = ", ".join(f"'{kind}'" for kind in sorted(DECODERS))
        raise text.error("model_type", f"the decoder '{text.kind:.60}' is not read; known: {known}")
    audio = wav2vec(ear)
    wanted = text.optional("hidden_size", "d_model", "n_embd")
    if wanted is not None and wanted != audio.output_width and text.optional("cross_attention_hidden_size") is None:
        bridge = projector_module((audio.output_width, wanted), modality="audio")
        return chain(name, audio, bridge, DECODERS[text.kind](text, wanted), last="cross_attention")
    llm = DECODERS[text.kind](text, audio.output_width)
    return Model(name=name, modules=(audio, llm), edges=(edge("audio", "llm", "cross_attention"),))


def omniasr(config: Fields, name: str) -> Model:
    audio, llm = wav2vec(config.part("audio_config")), text_module(config, "text_config")
    return chain(name, audio, projector_module((audio.output_width, llm.output_width), modality="audio"), llm)


def moss(config: Fields, name: str) -> Model:
    """Whisper's encoder, four tokens joined, two linears and a norm."""
    ear = config.part("audio_config")
    audio = whisper(ear) if ear.kind == "moss_transcribe_diarize_audio" else ear_of(config)
    llm, merge = text_module(config, "text_config"), config.count("audio_merge_size", most=100)
    width, bias = llm.output_width, config.get("projector_bias")
    dims = (audio.output_width * merge, width, width)
    last = projector_module(dims, modality="audio", merge=merge, bias=bias, stored=2 * width)
    return chain(name, audio, last, llm)


def canary(config: Fields, name: str) -> Model:
    """A FastConformer and a decoder with a bias on its tied head."""
    text = config.part("decoder_config")
    return _asr(name, parakeet(config.part("encoder_config")), text, config.flag("tie_word_embeddings"), None)


def cohere_asr(config: Fields, name: str) -> Model:
    """A FastConformer, one linear, a decoder with learned positions and a bias on its head."""
    audio = parakeet(config.part("encoder_config"))
    return _asr(name, audio, config, config.flag("tie_word_embeddings"), config.count("hidden_size"))


def _asr(name: str, audio: ModelModule, text: Fields, tied: bool, bridge: int | None) -> Model:
    width, bias = text.count("hidden_size"), text.get("attention_bias") is not False
    rows = text.count("max_position_embeddings", most=100_000_000) if bridge is not None else 0
    heads = text.count("num_attention_heads")
    if bridge is None and audio.output_width != width:
        raise text.error("hidden_size", f"expected the encoder's width {audio.output_width}, found {width}")
    llm = decoder(
        text,
        width if bridge is not None else audio.output_width,
        head_dim=text.optional("head_dim"),
        kv_heads=text.optional("num_key_value_heads") or heads,
        stored=text.count("vocab_size") + (rows + 2) * width,
        tied=tied,
        qkv_bias=bias,
        out_bias=bias,
    )
    if bridge is None:
        return Model(name=name, modules=(audio, llm), edges=(edge("audio", "llm", "cross_attention"),))
    last = projector_module((audio.output_width, width), modality="audio")
    return chain(name, audio, last, llm, last="cross_attention")
