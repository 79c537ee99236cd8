"""T5Gemma 2 (arXiv 2512.14856): Gemma 3 as encoder, which sees, and as decoder, whose attention reads its own rows and
the encoder's at once."""

from dataclasses import replace

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
