"""Audio encoders by the `model_type` of their configuration class."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import SOURCE, divided
from mmplan.scenario.scenario import AudioInput, ModelModule, Transformer

SAMPLES_PER_S = 16_000  # of raw sound, which all of them take
FRAMES_PER_S = 100  # of Whisper's mel spectrogram, of which two make a token


def whisper_blocks(
    ear: Fields, *, layers: str = "encoder_layers", heads: str = "encoder_attention_heads", key_bias: bool = False
) -> Transformer:
    """Whisper's encoder: layer norms, plain MLP, no bias on keys."""
    hidden, count = ear.count("d_model", "hidden_size"), ear.count(heads, "num_attention_heads")
    return Transformer(
        layers=ear.layers(layers, "num_hidden_layers"),
        hidden=hidden,
        heads=count,
        kv_heads=count,
        head_dim=divided(ear, hidden, count),
        ffn=ear.count("encoder_ffn_dim", "intermediate_size"),
        gated_mlp=False,
        causal=False,
        norm="layer",
        qkv_bias=True,
        key_bias=key_bias,
        out_bias=True,
        mlp_bias=True,
    )


def audio_module(shape: Transformer, audio: AudioInput, stored: int = 0) -> ModelModule:
    return ModelModule(
        name="audio",
        kind="audio_encoder",
        modality="audio",
        transformer=shape,
        audio=audio,
        stored=stored,
        source=SOURCE,
    )


def whisper(ear: Fields, *, pool: int = 1) -> ModelModule:
    """Clips filled up to the length of the stored positions (30 s)."""
    rows = ear.count("max_source_positions")
    audio = AudioInput(mel_bins=ear.count("num_mel_bins"), pad_s=2 * rows / FRAMES_PER_S, pool=pool, positions=rows)
    return audio_module(whisper_blocks(ear), audio)


def pooled_whisper(ear: Fields) -> ModelModule:
    """The same with pairs of tokens averaged."""
    return whisper(ear, pool=2)


def glm_asr(ear: Fields) -> ModelModule:
    """Rotary positions; the clip keeps its length."""
    shape = whisper_blocks(ear, layers="num_hidden_layers", heads="num_attention_heads")
    kv_heads = ear.optional("num_key_value_heads") or shape.heads
    if kv_heads != shape.heads or (ear.optional("head_dim") or shape.head_dim) != shape.head_dim:
        raise ear.error("num_key_value_heads", f"expected {shape.heads}, as many as heads, found {kv_heads}")
    return audio_module(shape, AudioInput(mel_bins=ear.count("num_mel_bins"), pad_s=None))


def chunked(ear: Fields) -> ModelModule:
    """Qwen3-Omni: three convolutions over frames and bins in chunks of a second, attention in windows of several."""
    channels = (ear.count("downsample_hidden_size"),) * 3
    frames = 2 * ear.count("n_window", most=100_000)
    front = AudioInput(mel_bins=ear.count("num_mel_bins"), pad_s=None, channels=channels, chunk_frames=frames)
    chunks = max(1, ear.count("n_window_infer", most=10_000_000) // frames)
    shape = replace(whisper_blocks(ear, key_bias=True), window_tokens=chunks * front.tokens(frames))
    return audio_module(shape, front)


def realtime(ear: Fields) -> ModelModule:
    """Voxtral's causal encoder: RMS norms, a gated MLP with a bias on its last linear alone, a sliding window."""
    hidden, heads = ear.count("hidden_size"), ear.count("num_attention_heads")
    shape = Transformer(
        layers=ear.layers(),
        hidden=hidden,
        heads=heads,
        kv_heads=ear.optional("num_key_value_heads") or heads,
        head_dim=ear.optional("head_dim") or divided(ear, hidden, heads),
        ffn=ear.count("intermediate_size"),
        gated_mlp=True,
        causal=True,
        norm="rms",
        qkv_bias=True,
        key_bias=False,
        out_bias=True,
        window_tokens=ear.optional("sliding_window"),
        sliding=True,
        stored=hidden,
    )
    return audio_module(shape, AudioInput(mel_bins=ear.count("num_mel_bins"), pad_s=None))


EARS: Mapping[str, Callable[[Fields], ModelModule]] = {
    "audioflamingo3_encoder": pooled_whisper,
    "glmasr_encoder": glm_asr,
    "qwen3_asr_encoder": chunked,
    "qwen3_omni_moe_audio_encoder": chunked,
    "qwen2_audio_encoder": pooled_whisper,
    "voxtral_encoder": whisper,
    "voxtral_realtime_encoder": realtime,
}


def ear_of(config: Fields, *keys: str, kind: str | None = None) -> ModelModule:
    """The audio encoder of a nested config; InputError when its model_type is unknown."""
    ear = config.part(*(keys or ("audio_config",)), kind=kind)
    build = EARS.get(ear.kind)
    if build is None:
        known = ", ".join(f"'{name}'" for name in sorted(EARS))
        raise ear.error("model_type", f"the audio encoder '{ear.kind:.60}' is not read; known: {known}")
    return build(ear)
