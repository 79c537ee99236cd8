"""Language models of sound in codes: CSM, Moshi, Kyutai's speech to text, Dia, MusicGen, Higgs Audio.

Codes of sound that comes in are looked up in tables and stand in the sequence; those of sound that goes out are
`speech_tokens` of the data. Ways back from codes to sound have numbers and no work.
"""

from dataclasses import replace
from itertools import pairwise

from mmplan.scenario.formats.hf.codecs import encodec, mimi
from mmplan.scenario.formats.hf.decoders import decoder
from mmplan.scenario.formats.hf.pages import t5_encoder
from mmplan.scenario.formats.hf.resamplers import encoder_module
from mmplan.scenario.formats.hf.text import language_module, text_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import divided, edge, stepping
from mmplan.scenario.scenario import Model, ModelEdge, ModelModule, TextInput, Transformer, Vocabulary
from mmplan.scenario.steps import Convolve, Dense, Form, Kept, Look, Steps, Usual


def heard(config: Fields, key: str, width: int) -> tuple[ModelModule, ModelModule]:
    """Mimi's encoder, and codes that are looked up in a table of the language model."""
    audio, steps = mimi(config.part(key))
    codes = stepping((*steps, Look(size=0, width=width)), (audio.output_width, width), name="codes", merge=2)
    return audio, replace(codes, modality="audio")


def along_codes(shape: Transformer, codes: int, *, kept: int = 0, stored: int = 0) -> ModelModule:
    """A small model over the codes of each row of the language model: a row becomes `codes` rows, which see the ones
    before them. `kept`: numbers of each block for the other codes."""
    shape = replace(shape, window_tokens=codes, causal=True)
    spread = Convolve(width=shape.hidden, taps=1, bias=False, spreads=codes)
    form = Form(front=(spread,), blocks=((shape.layers, (Usual(), Kept(size=kept))),))
    return encoder_module(shape, form, name="depth", modality="speech", stored=stored)


def chained(name: str, audio: tuple[ModelModule, ModelModule], llm: ModelModule, *behind: ModelModule) -> Model:
    edges = [edge("audio", "codes", "input"), edge("codes", "llm", "merge")]
    before = llm
    for module in behind:
        edges.append(edge(before.name, module.name, "input"))
        before = module
    return Model(name=name, modules=(*audio, llm, *behind), edges=tuple(edges))


def csm(config: Fields, name: str) -> Model:
    """A LLaMA over text and frames, a small one over the codes of each row (every row is priced as a frame)."""
    codes, size = config.count("num_codebooks", most=1_000), config.count("vocab_size")
    llm = language_module(config.read_as_stack("llama"), tied=False)
    width, table = llm.output_width, codes * size
    rest = (config.count("text_vocab_size") - size) * width
    llm = replace(llm, stored=rest + table * width * (1 if config.flag("tie_codebooks_embeddings") else 2))
    fields = config.part("depth_decoder_config")
    for key, wanted in (("num_codebooks", codes), ("backbone_hidden_size", width), ("vocab_size", size)):
        fields.same(key, wanted, f"{key} of the model")
    inner = text_module(fields.read_as_stack("llama")).transformer
    assert inner is not None
    depth = along_codes(inner, codes)
    last: Steps = (Dense(width=size, bias=False), Kept(size=(codes - 2) * size * inner.hidden))
    head = replace(stepping(last, (inner.hidden, size), name="depth_head"), modality="speech")
    return chained(name, heard(config, "codec_config", width), llm, depth, head)


def kyutai(config: Fields, name: str) -> Model:
    """A frame of sound and a word stand in one row; they are priced as rows of their own."""
    llm = language_module(config.read_as_stack("kyutai_text"), tied=config.flag("tie_word_embeddings"))
    rows = config.count("num_codebooks", most=1_000) * config.count("codebook_vocab_size") + 1
    llm = replace(llm, stored=rows * llm.output_width)
    config.log.notes.append("a frame and the word beside it are priced as two rows")
    return chained(name, heard(config, "codec_config", llm.output_width), llm)


def moshi(config: Fields, name: str) -> Model:
    """Two speakers' frames and words in one row each, and a small model over the codes of each row, whose linears
    differ from code to code."""
    llm = language_module(config.read_as_stack("kyutai_text"), tied=config.flag("tie_word_embeddings"))
    llm = replace(llm, stored=llm.output_width)
    named = config.get("architectures")
    if isinstance(named, list) and named[:1] == ["MoshiForCausalLM"]:
        return Model(name=name, modules=(llm,), edges=())
    fields, width, codes = config.part("depth_decoder_config"), llm.output_width, config.count("num_codebooks", most=64)
    fields.same("num_codebooks", codes, "num_codebooks of the model")
    size, inner = fields.count("audio_vocab_size"), fields.count("hidden_size")
    heads, ffn = fields.count("num_attention_heads"), fields.count("ffn_dim")
    fields.same("input_size", width, "hidden_size of the model")
    shape = Transformer(
        layers=fields.layers(),
        hidden=inner,
        heads=heads,
        kv_heads=fields.optional("num_key_value_heads") or heads,
        head_dim=fields.optional("head_dim") or divided(fields, inner, heads),
        ffn=ffn // 2,
        gated_mlp=True,
        causal=True,
        norm="rms",
        final_norm=False,
    )
    across = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim * inner
    again = (codes - 1) * (across + 3 * inner * (ffn // 2))
    tables = (fields.count("vocab_size") + 1) * inner + (codes - 1) * (size + 1) * inner
    depth = along_codes(shape, codes, kept=again, stored=tables + (codes - 1) * width * inner)
    last: Steps = (Dense(width=size, bias=False), Kept(size=(codes - 1) * size * inner))
    head = replace(stepping(last, (inner, size), name="depth_head"), modality="speech")
    own = config.optional("audio_vocab_size") or config.part("audio_encoder_config").count("codebook_size")
    llm = replace(llm, stored=llm.stored + 2 * codes * (own + 1) * width)
    config.log.notes.append("a frame and the word beside it are priced as two rows")
    return chained(name, heard(config, "audio_encoder_config", width), llm, depth, head)


def dia(config: Fields, name: str) -> Model:
    """Bytes of text, and a decoder over frames of several codes."""
    said, spoken = config.part("encoder_config"), config.part("decoder_config")
    text = replace(
        language_module(said.read_as_stack("dia_text"), tied=True),
        name="text",
        kind="text_encoder",
        text=TextInput(positions="rotary"),
    )
    assert text.transformer is not None
    text = replace(text, transformer=replace(text.transformer, causal=False))
    llm = language_module(spoken.read_as_stack("dia_text"), tied=False, name="llm")
    assert llm.transformer is not None and llm.vocabulary is not None
    shape = llm.transformer
    heads = spoken.count("cross_num_attention_heads")
    spoken.same("cross_hidden_size", text.output_width, "the text encoder's width")
    spoken.same("cross_head_dim", shape.head_dim, "head_dim =")
    spoken.same("cross_num_attention_heads", shape.heads, "num_attention_heads =")
    kv = spoken.count("cross_num_key_value_heads")
    shape = replace(shape, cross_layers=tuple(range(shape.layers)), cross_width=text.output_width, cross_also=True)
    # keys and values of the text have heads of their own number
    more = 2 * (kv - shape.kv_heads) * shape.head_dim * text.output_width
    if more < 0 or kv > heads:
        raise spoken.error("cross_num_key_value_heads", f"expected {shape.kv_heads} to {heads}, found {kv}")
    shape = replace(shape, stored=more)
    size = llm.vocabulary.size * spoken.count("num_channels", most=1_000)
    llm = replace(llm, modality="speech", transformer=shape, vocabulary=Vocabulary(size=size))
    return Model(name=name, modules=(text, llm), edges=(edge("text", "llm", "cross_attention"),))


def musicgen(config: Fields, name: str) -> Model:
    """T5 reads the prompt; a decoder over frames of several codes attends to it. With melody the prompt stands in front
    of the frames instead."""
    said, spoken = config.part("text_encoder"), config.part("decoder")
    if said.kind != "t5":
        raise said.error("model_type", f"expected 't5', found '{said.kind:.60}'")
    said.refuse_unless("is_decoder", False, None, why="it attends to another model")
    sound = config.part("audio_encoder")
    if sound.kind != "encodec":
        raise sound.error("model_type", f"expected 'encodec', found '{sound.kind:.60}'")
    buckets = said.count("relative_attention_num_buckets") * said.count("num_heads")
    text = t5_encoder(said, stored=buckets)
    text = replace(text, name="text", vocabulary=Vocabulary(size=said.count("vocab_size")))
    width, size = spoken.count("hidden_size"), spoken.count("vocab_size")
    codes, melody = spoken.count("num_codebooks", most=64), config.kind == "musicgen_melody"
    llm = decoder(spoken, width, ffn="ffn_dim", tied=False, bias=False)
    assert llm.transformer is not None
    if melody:
        llm = replace(llm, transformer=replace(llm.transformer, cross_layers=(), cross_width=None, cross_also=False))
    kept = encodec(sound)
    llm = replace(
        llm,
        modality="speech",
        vocabulary=Vocabulary(size=codes * size),
        stored=codes * width + kept,
    )
    config.log.notes.append("audio_encoder: gives codes before training: it has weights in 'llm' and no work")
    way: list[ModelModule] = [text]
    if melody or (text.output_width != width and spoken.get("cross_attention_hidden_size") is None):
        chroma = (config.count("num_chroma", most=10_000) + 1) * width if melody else 0
        same = text.output_width == width
        steps: Steps = (Kept(size=chroma),) if same else (Dense(width=width), Kept(size=chroma))
        way.append(replace(stepping(steps, (text.output_width, width), name="text_projector"), modality="text"))
    edges: list[ModelEdge] = [edge(a.name, b.name, "input") for a, b in pairwise(way)]
    edges.append(edge(way[-1].name, "llm", "merge" if melody else "cross_attention"))
    return Model(name=name, modules=(*way, llm), edges=tuple(edges))


def higgs(config: Fields, name: str) -> Model:
    """Rows of sound pass norms and MLPs of their own, as wide as those of text; frames are `text_tokens` too."""
    llm = language_module(config.read_as_stack("llama"), tied=False)
    assert llm.transformer is not None
    shape = llm.transformer
    bias = config.flag("mlp_bias")
    again = 3 * shape.hidden * shape.ffn + 2 * shape.hidden + bias * (2 * shape.ffn + shape.hidden)
    codes = config.count("num_codebooks", most=1_000) * config.count("codebook_size")
    words = config.count("vocab_size") * shape.hidden
    llm = replace(llm, transformer=replace(shape, stored=again), vocabulary=Vocabulary(size=codes), stored=words)
    return Model(name=name, modules=(llm,), edges=())
