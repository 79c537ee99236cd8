"""Families of audio encoder, projector and language model."""

from mmplan.scenario.formats.hf.ears import ear_of
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import chain, projector_module
from mmplan.scenario.scenario import Model


def qwen2_audio(config: Fields, name: str) -> Model:
    """Whisper's encoder with pairs of tokens averaged, one linear."""
    audio, llm = ear_of(config), text_module(config, "text_config")
    return chain(name, audio, projector_module((audio.output_width, llm.output_width), modality="audio"), llm)


def voxtral(config: Fields, name: str) -> Model:
    """As many tokens joined as fill the encoder's `intermediate_size`, two linears without bias."""
    audio, ear = ear_of(config), config.part("audio_config")
    llm = text_module(config, "text_config")
    joined, width = ear.count("intermediate_size", "encoder_ffn_dim"), llm.output_width
    if joined % audio.output_width:
        message = f"{joined} is not a multiple of the width {audio.output_width} of the tokens that are joined"
        raise ear.error("intermediate_size", message)
    merge = joined // audio.output_width
    return chain(name, audio, projector_module((joined, width, width), modality="audio", merge=merge, bias=False), llm)


def audio_flamingo(config: Fields, name: str) -> Model:
    audio, llm = ear_of(config), text_module(config, "text_config")
    width, bias = llm.output_width, config.get("projector_bias")
    return chain(name, audio, projector_module((audio.output_width, width, width), modality="audio", bias=bias), llm)


def qwen3_asr(config: Fields, name: str) -> Model:
    audio, ear = ear_of(config), config.part("audio_config")
    llm, width = text_module(config, "text_config"), ear.count("output_dim")
    dims = (audio.output_width, audio.output_width, width)
    return chain(name, audio, projector_module(dims, modality="audio"), llm)


def glm_asr(config: Fields, name: str) -> Model:
    """Four tokens joined, two linears, the inner one twice as wide as the language model."""
    audio, ear = ear_of(config), config.part("audio_config")
    llm = text_module(config, "text_config")
    joined, width = ear.count("intermediate_size"), llm.output_width
    if joined % audio.output_width:
        message = f"{joined} is not a multiple of the width {audio.output_width} of the tokens that are joined"
        raise ear.error("intermediate_size", message)
    merge = joined // audio.output_width
    return chain(name, audio, projector_module((joined, 2 * width, width), modality="audio", merge=merge), llm)


def voxtral_realtime(config: Fields, name: str) -> Model:
    """A causal encoder with a sliding window; four tokens joined, two linears without bias."""
    audio, llm = ear_of(config), text_module(config, "text_config")
    merge, width = config.count("downsample_factor", most=100), llm.output_width
    dims = (audio.output_width * merge, width, width)
    return chain(name, audio, projector_module(dims, modality="audio", merge=merge, bias=False), llm)
