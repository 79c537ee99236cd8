"""T5Gemma: Gemma 2 as encoder and as decoder. T5Gemma 2 (arXiv 2512.14856): Gemma 3 as encoder, which sees, and as
decoder, whose attention reads its own rows and the encoder's at once."""

from dataclasses import replace

from mmplan.scenario.formats.hf.blocks_by_layer import each
from mmplan.scenario.formats.hf.llava_like import pooled_to
from mmplan.scenario.formats.hf.text import language_module
from mmplan.scenario.formats.hf.towers import tower_of
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import edge
from mmplan.scenario.scenario import Model, TextInput
from mmplan.scenario.steps import Attend, Form, Mlp, Normed, Steps, residual

RMS = Normed(kind="rms")


def t5gemma2(config: Fields, name: str) -> Model:
    """Both sides are priced with the words of a sample; windows of the decoder are not."""
    outer, said = config.part("encoder"), config.part("decoder")
    for one in (config, said):
        one.refuse_unless("tie_word_embeddings", True, None, why="a head or table of its own")
    vision = tower_of(outer)
    encoder = language_module(outer.part("text_config").read_as_stack("t5gemma2_text"), tied=True, name="encoder")
    llm = language_module(said.read_as_stack("t5gemma2_text"), tied=True)
    assert encoder.transformer is not None and encoder.vocabulary is not None and llm.transformer is not None
    read = encoder.output_width
    encoder = replace(
        encoder,
        kind="text_encoder",
        transformer=replace(encoder.transformer, causal=False),
        vocabulary=replace(encoder.vocabulary, elsewhere=True),
        text=TextInput(positions="rotary"),
    )
    said.same("hidden_size", read, "the encoder's width")
    shape, layers = llm.transformer, llm.transformer.layers
    block: Steps = (residual(RMS, Attend(across=True), RMS), residual(RMS, Mlp(), RMS))
    shape = replace(shape, cross_layers=tuple(range(layers)), cross_width=read)
    llm = replace(llm, transformer=shape, form=Form(blocks=((layers, block),), together=True), stored=read)
    seen = pooled_to(outer, vision, read)
    config.log.notes.append("encoder and decoder are both priced with the words of a sample")
    edges = (
        edge("vision", "projector", "input"),
        edge("projector", "encoder", "merge"),
        edge("encoder", "llm", "cross_attention"),
    )
    return Model(name=name, modules=(vision, seen, encoder, llm), edges=edges)


def t5gemma(config: Fields, name: str) -> Model:
    """T5Gemma (arXiv 2504.06225): Gemma 2 on both sides; each block of the decoder attends to its rows and then to the
    encoder's. The decoder's own `tie_word_embeddings` decides nothing."""
    heard, said = (config.part(side).read_as_stack("gemma2") for side in ("encoder", "decoder"))
    encoder = language_module(heard, tied=True, name="encoder")
    llm = language_module(said, tied=config.get("tie_word_embeddings") is not False)
    assert encoder.transformer is not None and llm.transformer is not None
    read, layers = encoder.output_width, llm.transformer.layers
    both = each(encoder.transformer, lambda _, block: replace(block, causal=False))
    encoder = replace(encoder, kind="text_encoder", transformer=both, text=TextInput(positions="rotary"))
    crossed = {"cross_layers": tuple(range(layers)), "cross_width": read, "cross_also": True}
    llm = replace(llm, transformer=each(llm.transformer, lambda _, block: replace(block, **crossed)))  # type: ignore[arg-type]
    config.log.notes.append("encoder and decoder are both priced with the words of a sample")
    return Model(name=name, modules=(encoder, llm), edges=(edge("encoder", "llm", "cross_attention"),))
