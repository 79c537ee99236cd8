"""Nemotron 3.5 Transcribe and Nemotron 3 Diarization: encoders of stacked frames, one that listens and one that tells
speakers apart; what the second says is added to the first one's tokens."""

from dataclasses import replace

from mmplan.scenario.formats.hf.ears import audio_module
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import apart, divided, edge, merged, stepping
from mmplan.scenario.scenario import AudioInput, Model, ModelEdge, ModelModule, Transformer
from mmplan.scenario.steps import Active, Average, Convolve, Dense, Form, Join, Kept, Look, Normed, Split, Steps

# Mixers of the language model where a file has none (configuration_nemotron3_5_transcribe.py of transformers 5.24).
HEAD = "nemotron3_diarization_head"
PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def encoder(ear: Fields, name: str, *, qk_norm: bool, window: int) -> ModelModule:
    """Layer norms, plain MLPs, a bias behind attention alone; frames side by side pass one linear and a norm."""
    hidden, heads = ear.count("hidden_size"), ear.count("num_attention_heads")
    kv_heads = ear.optional("num_key_value_heads") or heads
    if kv_heads != heads:
        raise ear.error("num_key_value_heads", f"expected {heads}, as many as heads, found {kv_heads}")
    shape = Transformer(
        layers=ear.layers(),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(ear, hidden, heads),
        ffn=ear.count("intermediate_size"),
        gated_mlp=False,
        causal=False,
        norm="layer",
        out_bias=True,
        mlp_bias=True,
        qk_norm=qk_norm,
        window_tokens=window,
    )
    bins, stacked = ear.count("num_mel_bins", most=100_000), ear.count("subsampling_factor", most=1_000)
    front: Steps = (Join(rows=stacked), Dense(width=hidden, bias=False), Normed())
    entry = AudioInput(mel_bins=bins, pad_s=None, stride=stacked)
    return replace(audio_module(shape, entry), name=name, form=Form(front=front, raw_width=bins))


def _chunk(config: Fields, *, cached: bool) -> int:
    """Frames that a frame attends to: its chunk with what stands before and behind it, and what is cached of before."""
    sides = ("chunk_left_context", "chunk_right_context")
    window = config.count("chunk_length") + sum(config.count(side, least=0) for side in sides)
    if not cached:
        return window
    cache = (
        config.part("streaming_config", kind="nemotron3_diarization_streaming").optional("speaker_cache_length") or 0
    )
    return window + config.count("fifo_length") + cache


def _speakers(config: Fields) -> tuple[ModelModule, Steps]:
    """The encoder, and steps to rows of each frame of the spectrogram."""
    ear, head = config.part("audio_config"), config.part("head_config", kind=HEAD)
    module = encoder(ear, "speakers", qk_norm=False, window=_chunk(config, cached=True))
    width, times = head.count("hidden_size"), head.count("subsampling_factor", most=1_000)
    return module, (Dense(width=width), Convolve(width=width * times, taps=3), Split(parts=times))


def diarization(config: Fields, name: str) -> Model:
    module, steps = _speakers(config)
    width = config.part("head_config", kind=HEAD).count("hidden_size")
    return apart(name, (module, _projecting(steps, module.output_width, width, "speaker_frames")))


def _projecting(steps: Steps, inputs: int, width: int, name: str) -> ModelModule:
    return replace(stepping(steps, (inputs, width), name=name), modality="audio")


def _ways(config: Fields, width: int) -> tuple[ModelModule, ModelModule, ModelModule]:
    """The encoder that listens, the one that tells speakers apart, and what makes rows of width `width` of the second:
    probabilities of speakers, whose rows of a fixed table are summed. No gradient passes their threshold."""
    ear, second = config.part("asr_config"), config.part("diarization_config")
    audio = encoder(ear, "audio", qk_norm=True, window=_chunk(second, cached=False))
    audio = replace(audio, stored=2 * audio.output_width)  # a second norm at the end
    speakers, steps = _speakers(second)
    head = second.part("head_config", kind=HEAD)
    inner, count = head.count("hidden_size"), head.count("num_speakers", most=100_000)
    said: Steps = (Active(), Dense(width=inner), Active(), Dense(width=count), Active(function="sigmoid"))
    mean: Steps = (Average(rows=head.count("subsampling_factor", most=1_000)), Normed(), Look(size=0, width=width))
    silence = Kept(size=speakers.output_width)
    last = _projecting((silence, *steps, *said, *mean), speakers.output_width, width, "speaker_projector")
    config.log.notes.append("speakers: no gradient passes their threshold, so freeze the module in a scenario")
    return audio, speakers, last


def transcribing_encoder(config: Fields, name: str) -> Model:
    audio, speakers, last = _ways(config, config.part("asr_config").count("hidden_size"))
    return apart(name, (audio,), (speakers, last))


def speechlm(config: Fields, name: str) -> Model:
    """The encoder of word times is not run in training; its numbers stand in the projector."""
    text = config.part("text_config")
    if not {"layers_block_type", "hybrid_override_pattern", "num_hidden_layers"} & set(text.values):
        given = {**(config.values.get("text_config") or {}), "hybrid_override_pattern": PATTERN}
        defaults = {**text.defaults, **given}
        text = replace(text, values=given, defaults=defaults)
    llm = text_module(text, tied=False)
    audio, speakers, last = _ways(config.part("audio_config"), llm.output_width)
    projected: Steps = (Dense(width=llm.output_width), Kept(size=_word_times(config)))
    heard = _projecting(projected, audio.output_width, llm.output_width, "audio_projector")
    config.log.notes.append("the encoder of word times has weights in audio_projector and no work")
    model = merged(name, llm, (audio, heard))
    added = ModelEdge(producer=last.name, consumer=llm.name, kind="add", consumer_layer=0)
    modules = (*model.modules[:-1], speakers, last, llm)
    return replace(model, modules=modules, edges=(*model.edges, edge(speakers.name, last.name, "input"), added))


def _word_times(config: Fields) -> int:
    """Numbers of the blocks that align words, of what spreads their frames, and of their head."""
    fields = config.part("word_timestamp_config")
    width, ffn, times = (
        fields.count("hidden_size"),
        fields.count("intermediate_size"),
        fields.count("upsampling_factor"),
    )
    head = divided(fields, width, fields.count("num_attention_heads"))
    block = 4 * width * width + width + 4 * head + 2 * width * ffn + ffn + width + 4 * width
    spread = width * width * times + width
    return fields.layers() * block + spread + 4 * width + fields.count("vocab_size") * (width + 1)
