"""Florence-2: DaViT (arXiv 2204.03645), whose tokens and widths change four times, and BART with the image in front."""

from dataclasses import replace
from itertools import pairwise

from mmplan.scenario.formats.hf.blocks_by_layer import by_layer
from mmplan.scenario.formats.hf.decoders import bart
from mmplan.scenario.formats.hf.resamplers import encoder_module
from mmplan.scenario.formats.hf.vit import BIASES, POST, vision_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import SOURCE, divided, edge, stepping
from mmplan.scenario.scenario import Model, ModelModule, TextInput, Transformer, VisionInput, Vocabulary
from mmplan.scenario.steps import Attend, Dense, Form, Kept, Mlp, Normed, Steps, conv, residual

SIDE = 768  # pixels (microsoft/Florence-2-large, preprocessor_config.json)


def florence2(config: Fields, name: str) -> Model:
    """The encoder reads image tokens and words, the decoder words; both are priced with the sample's words. Of the
    class of the file, which stores positions of rows and columns and one matrix of tokens for both sides."""
    fields, text = config.part("vision_config"), config.part("text_config")
    for one in (config, text):
        one.refuse_unless("tie_word_embeddings", True, None, why="tables of their own for encoder, decoder and head")
    stages, width = davit(fields), fields.count("projection_dim")
    last = stages[-1].output_width
    rows = fields.count("max_position_embeddings")
    steps: Steps = (Kept(size=rows * last), Dense(width=width, bias=False), Normed())
    encoder = bart_encoder(text)
    decoder = bart(text, encoder.output_width)
    assert decoder.vocabulary is not None
    decoder = replace(decoder, vocabulary=replace(decoder.vocabulary, tied=True))
    modules = (*stages, stepping(steps, (last, width), name="projector"), encoder, decoder)
    inner = [edge(a.name, b.name, "input") for a, b in pairwise(modules[:-2])]
    ends = (edge("projector", "encoder", "merge"), edge("encoder", "llm", "cross_attention"))
    config.log.notes.append("encoder and decoder are both priced with the words of a sample")
    return Model(name=name, modules=modules, edges=(*inner, *ends))


def bart_encoder(text: Fields) -> ModelModule:
    """BART's encoder; its table is the decoder's."""
    width, heads = text.count("d_model"), text.count("encoder_attention_heads")
    shape = Transformer(
        layers=text.layers("encoder_layers"),
        hidden=width,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(text, width, heads),
        ffn=text.count("encoder_ffn_dim"),
        gated_mlp=False,
        causal=False,
        norm="layer",
        **BIASES,
        **POST,
    )
    rows = text.count("max_position_embeddings", most=100_000_000) + 2
    return ModelModule(
        name="encoder",
        kind="text_encoder",
        modality="text",
        transformer=shape,
        vocabulary=Vocabulary(size=text.count("vocab_size"), elsewhere=True),
        text=TextInput(positions="none"),
        stored=(rows + 2) * width,
        source=SOURCE,
    )


def davit(fields: Fields) -> tuple[ModelModule, ...]:
    """Of each depth a block that attends in windows and one over channels, whose products are those of windows as long
    as a group is wide; depthwise convolutions in front of each branch."""
    depths, widths = fields.stages("depths", count=4), fields.numbers("embed_dim", count=4)
    heads, groups = fields.numbers("num_heads", count=4), fields.numbers("num_groups", count=4)
    sides, strides = fields.numbers("patch_size", count=4), fields.numbers("patch_stride", count=4)
    first = fields.get("patch_prenorm")
    before = first if isinstance(first, list) and len(first) == 4 else [False, True, True, True]
    channels, window, bias = (
        fields.count("in_channels", most=1_000),
        fields.count("window_size"),
        fields.flag("qkv_bias"),
    )
    stages: list[ModelModule] = []
    for index, width in enumerate(widths):
        embed = conv(width, sides[index], stride=strides[index])
        front: Steps = (Normed(), embed) if before[index] else (embed, Normed())
        plain = Transformer(
            layers=1,
            hidden=width,
            heads=heads[index],
            kv_heads=heads[index],
            head_dim=divided(fields, width, heads[index]),
            ffn=int(width * fields.ratio("mlp_ratio")),
            gated_mlp=False,
            causal=False,
            norm="layer",
            final_norm=False,
            window_tokens=window**2,
            **{**BIASES, "qkv_bias": bias},
        )
        group = divided(fields, width, groups[index])
        across = replace(plain, heads=groups[index], kv_heads=groups[index], head_dim=group, window_tokens=group)
        shape = by_layer([plain, across] * depths[index])
        near = residual(conv(width, 3, groups=width))
        steps: Steps = (near, residual(Normed(), Attend()), near, residual(Normed(), Mlp()))
        form = Form(front=front, raw_width=None if index else channels, blocks=((shape.layers, steps),))
        if index:
            stages.append(encoder_module(shape, form, name=f"vision_stage{index}"))
        else:
            seen = VisionInput(patch=strides[0], channels=channels, image_size=SIDE)
            stages.append(replace(vision_module(shape, seen), form=form))
    return tuple(stages)
