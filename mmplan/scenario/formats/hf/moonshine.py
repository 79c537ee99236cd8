"""Moonshine Streaming: raw sound in frames of 5 ms, an encoder with windows of its own in each block, a decoder with
gated MLPs that attends to it."""

from dataclasses import replace

from mmplan.scenario.document import shown
from mmplan.scenario.formats.hf.blocks_by_layer import each
from mmplan.scenario.formats.hf.decoders import decoder
from mmplan.scenario.formats.hf.ears import audio_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import chain, divided, edge, projector_module
from mmplan.scenario.scenario import AudioInput, Model, ModelModule, Transformer
from mmplan.scenario.steps import Active, Convolve, Dense, Form, Steps

# Frames before and behind that a block sees (configuration_moonshine_streaming.py of transformers 5.24).
WINDOWS = ((16, 4), (16, 4), (16, 0), (16, 0), (16, 4), (16, 4))


def streaming(config: Fields, name: str) -> Model:
    """Positions of the encoder's rows, and a linear where widths differ, stand in the decoder."""
    audio, width = _encoder(config.part("encoder_config")), config.count("hidden_size")
    config.refuse_unless("attention_bias", False, None, why="biases of this class are not read")
    read = audio.output_width
    stored = config.count("max_position_embeddings", most=100_000_000) * read
    heads = config.optional("num_key_value_heads") or config.count("num_attention_heads")
    llm = decoder(
        config,
        width,
        stored=stored,
        tied=config.flag("tie_word_embeddings"),
        bias=False,
        mlp_bias=True,
        norm="rms",
        gated_mlp=True,
        kv_heads=heads,
    )
    if read != width:
        bridge = projector_module((read, width), modality="audio", bias=False)
        return chain(name, audio, bridge, llm, last="cross_attention")
    return Model(name=name, modules=(audio, llm), edges=(edge("audio", "llm", "cross_attention"),))


def _encoder(ear: Fields) -> ModelModule:
    ear.refuse_unless("attention_bias", False, None, why="biases of this class are not read")
    hidden, heads = ear.count("hidden_size"), ear.count("num_attention_heads")
    layers = ear.layers()
    given = ear.get("sliding_windows")
    windows = WINDOWS if given is None else given
    pairs = [pair for pair in windows if isinstance(pair, list | tuple) and len(pair) == 2] if windows else []
    numbers = [one for pair in pairs for one in pair]
    if len(pairs) != layers or not all(isinstance(one, int) and 0 <= one < 1_000_000 for one in numbers):
        raise ear.error("sliding_windows", f"expected {layers} pairs of whole numbers, found {shown(given)}")
    shape = Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=ear.optional("num_key_value_heads") or heads,
        head_dim=ear.optional("head_dim") or divided(ear, hidden, heads),
        ffn=ear.count("intermediate_size"),
        gated_mlp=False,
        causal=False,
        norm="rms",
        mlp_bias=True,
    )
    shape = each(shape, lambda index, block: replace(block, window_tokens=sum(pairs[index]) or 1))
    rate, length = ear.count("sample_rate", most=1_000_000), ear.ratio("frame_ms")
    samples = max(1, round(rate * length / 1000))
    front: Steps = (
        *(Dense(width=hidden, bias=False), Active(function="silu")),
        *(Convolve(width=2 * hidden, taps=5, joins=2), Active(function="silu")),
        Convolve(width=hidden, taps=5, joins=2),
    )
    entry = AudioInput(mel_bins=samples, frames_per_s=max(1, round(rate / samples)), pad_s=None, stride=4)
    return replace(audio_module(shape, entry, stored=1), form=Form(front=front, raw_width=samples))
