"""Voices of their own kinds: VibeVoice, which diffuses sound, Bark, three GPTs in a row, and CLVP, a GPT whose sound
two encoders compare with the words."""

from dataclasses import replace

from mmplan.scenario.formats.hf.codecs import encodec, tokenizer, tokenizer_decoder
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import SOURCE, divided, edge, projector_module, stepping
from mmplan.scenario.scenario import Model, ModelEdge, ModelModule, TextInput, Transformer, Vocabulary
from mmplan.scenario.steps import Active, Dense, Kept, Normed, Steps, residual


def vibevoice_asr(config: Fields, name: str) -> Model:
    """Two encoders of raw sound whose projected rows are added; the second's behind the first block."""
    parts = [("audio", "acoustic_tokenizer_encoder_config"), ("audio_semantic", "semantic_tokenizer_encoder_config")]
    llm = text_module(config, "text_config")
    ways = [_connected(tokenizer(config.part(key), side), llm.output_width, side) for side, key in parts]
    config.log.notes.append("rows of the second encoder are added behind the first block, not in front of it")
    return _added(name, llm, ways)


def _connected(audio: ModelModule, width: int, side: str) -> tuple[ModelModule, ModelModule]:
    steps: Steps = (Dense(width=width), Normed(kind="rms"), Dense(width=width))
    return audio, replace(stepping(steps, (audio.output_width, width), name=f"{side}_projector"), modality="audio")


def _added(name: str, llm: ModelModule, ways: list[tuple[ModelModule, ModelModule]], *behind: ModelModule) -> Model:
    edges = [edge(audio.name, last.name, "input") for audio, last in ways]
    edges.append(edge(ways[0][1].name, llm.name, "merge"))
    edges += [ModelEdge(producer=last.name, consumer=llm.name, kind="add", consumer_layer=0) for _, last in ways[1:]]
    edges += [edge(llm.name, module.name, "input") for module in behind]
    return Model(name=name, modules=(*(module for way in ways for module in way), llm, *behind), edges=tuple(edges))


def vibevoice(config: Fields, name: str) -> Model:
    """Latents of sound stand in the sequence; a small network diffuses the next one from each row."""
    sound, llm = config.part("audio_config"), text_module(config, "text_config")
    tied = config.part("text_config").flag("tie_word_embeddings")
    assert llm.vocabulary is not None
    llm = replace(llm, vocabulary=replace(llm.vocabulary, tied=tied), stored=llm.stored + 2 + tokenizer_decoder(sound))
    width = llm.output_width
    first = _connected(tokenizer(sound, "audio"), width, "audio")
    second = _connected(tokenizer(config.part("semantic_model_config"), "audio_semantic"), width, "audio_semantic")
    fields, latent = config.part("diffusion_head_config"), sound.count("hidden_size")
    fields.refuse_unless("mlp_bias", False, None, why="biases in the head that diffuses")
    ffn, layers = fields.count("intermediate_size"), fields.layers()
    rms = Normed(kind="rms")
    inner: Steps = (rms, Dense(width=ffn, bias=False), Active(function="silu"), Dense(width=width, bias=False))
    kept = Kept(size=3 * width * width + width * ffn)  # what scales and shifts rows, and the gate
    frequency = fields.count("frequency_embedding_size")
    once = Kept(size=latent * width + frequency * width + width * width + 2 * width * width)
    steps: Steps = (
        Dense(width=width, bias=False),
        once,
        *(residual(*inner, kept),) * layers,
        Dense(width=latent, bias=False),
    )
    last = replace(stepping(steps, (width, latent), name="diffusion"), modality="speech")
    config.log.notes.append("the head that diffuses runs on every row; what scales its rows has weights and no work")
    config.log.notes.append("rows of the second encoder are added behind the first block, not in front of it")
    return _added(name, llm, [first, second], last)


def bark(config: Fields, name: str) -> Model:
    """Three GPTs one after the other, from words to coarse and fine codes, each trained alone."""
    parts = ("semantic", "coarse_acoustics", "fine_acoustics")
    modules = [_gpt(config.part(f"{part}_config"), part) for part in parts]
    kept = encodec(config.part("codec_config"))
    modules[-1] = replace(modules[-1], stored=modules[-1].stored + kept)
    config.log.notes.append("codec_config: its weights stand in the last module and have no work")
    return Model(name=name, modules=tuple(modules), edges=())


def _gpt(fields: Fields, name: str) -> ModelModule:
    width, heads = fields.count("hidden_size"), fields.count("num_heads")
    bias = fields.get("bias") is not False
    fine = name == "fine_acoustics"
    size, out = fields.count("input_vocab_size"), fields.count("output_vocab_size")
    shape = Transformer(
        layers=fields.layers("num_layers"),
        hidden=width,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(fields, width, heads),
        ffn=4 * width,
        gated_mlp=False,
        causal=not fine,
        norm="layer",
        norm_bias=bias or fine,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )
    stored = fields.count("block_size") * width + (size - out) * width
    if fine:
        total, given = fields.count("n_codes_total", most=1_000), fields.count("n_codes_given", most=1_000)
        tied = fields.get("tie_word_embeddings") is not False
        stored = fields.count("block_size") * width + (total - 1) * size * width
        stored += (total - given - 1) * out * width if not tied else 0
        return _sound(name, shape, Vocabulary(size=out, tied=tied), stored + (size - out) * width)
    return _sound(name, shape, Vocabulary(size=out), stored)


def _sound(name: str, shape: Transformer, vocabulary: Vocabulary, stored: int) -> ModelModule:
    return ModelModule(
        name=name,
        kind="language_model",
        modality="speech",
        transformer=shape,
        vocabulary=vocabulary,
        text=TextInput(positions="none"),
        stored=stored,
        source=SOURCE,
    )


def clvp(config: Fields, name: str) -> Model:
    """A GPT over codes of sound behind a row that blocks of attention make of words and a spectrogram (kept), and two
    encoders that compare what was said with the words."""
    fields = config.part("decoder_config")
    width, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    ffn = fields.optional("n_inner") or 4 * width
    shape = Transformer(
        layers=fields.layers(),
        hidden=width,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(fields, width, heads),
        ffn=ffn,
        gated_mlp=False,
        causal=True,
        norm="layer",
        qkv_bias=fields.flag("use_attention_bias"),
        out_bias=True,
        mlp_bias=True,
    )
    texts = config.part("text_config")
    blocks = fields.count("num_mel_attn_blocks", least=0, most=1_000)
    once = (texts.count("vocab_size") + fields.count("max_text_tokens")) * width
    biases = 3 * width if fields.flag("use_attention_bias") else 0
    once += (fields.count("feature_size") + 1) * width + blocks * (3 * width + 4 * width * width + biases)
    size = fields.count("vocab_size")
    stored = fields.count("max_position_embeddings") * width + size + 2 * width + once
    llm = _sound("llm", shape, Vocabulary(size=size), stored)
    sides = [_clvp_encoder(texts, "text"), _clvp_encoder(config.part("speech_config"), "speech")]
    sides[1] = replace(sides[1], stored=sides[1].stored + 1)
    ends = [
        projector_module((side.output_width, one.count("projection_dim")), name=f"{side.name}_projector", bias=False)
        for side, one in zip(sides, (texts, config.part("speech_config")), strict=True)
    ]
    edges = tuple(edge(side.name, end.name, "input") for side, end in zip(sides, ends, strict=True))
    return Model(name=name, modules=(llm, *sides, *ends), edges=edges)


def _clvp_encoder(fields: Fields, name: str) -> ModelModule:
    width, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    shape = Transformer(
        layers=fields.layers(),
        hidden=width,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(fields, width, heads),
        ffn=fields.count("intermediate_size"),
        gated_mlp=True,
        causal=False,
        norm="rms",
        qkv_bias=fields.flag("use_attention_bias"),
        out_bias=True,
        mlp_bias=True,
        final_norm=False,
    )
    return ModelModule(
        name=name,
        kind="text_encoder",
        modality="text",
        transformer=shape,
        vocabulary=Vocabulary(size=fields.count("vocab_size")),
        text=TextInput(positions="rotary"),
        stored=2 * width,
        source=SOURCE,
    )
