"""SAM 3 and SAM 3 LiteText: a ViT with windows, necks at four scales, words, an encoder and a decoder over image rows
that attend to those words, and SAM 2's way to follow objects.

Words and prompts are a few rows: what works on them is kept and not counted, as are heads.
"""

from dataclasses import replace

from mmplan.scenario.formats.hf.pairs import text_tower
from mmplan.scenario.formats.hf.resamplers import encoder_module, querying
from mmplan.scenario.formats.hf.sam_family import mask_decoder, mlp, remembering
from mmplan.scenario.formats.hf.vit import fixed, vision_module, vit
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import apart, edge, projector_module, stepping
from mmplan.scenario.scenario import Model, ModelModule
from mmplan.scenario.steps import (
    Active,
    Attend,
    Average,
    Convolve,
    Dense,
    Fork,
    Form,
    Kept,
    Mlp,
    Normed,
    Steps,
    Usual,
    conv,
    residual,
)

SCALES = (4.0, 2.0, 1.0, 0.5)


def sam3(config: Fields, name: str) -> Model:
    return _model(name, _seen(config.part("vision_config")), _detecting(config))


def tracker(config: Fields, name: str) -> Model:
    """Points and boxes in place of words."""
    vision, necks, width = _seen(config.part("vision_config"))
    return _model(name, (vision, necks, width), (list(mask_decoder(config, width, width)), []))


def tracker_video(config: Fields, name: str) -> Model:
    vision, necks, width = _seen(config.part("vision_config"))
    memory, more = remembering(config, width)
    return _model(name, (vision, necks, width), ([*mask_decoder(config, width, width + more), memory], []))


def video(config: Fields, name: str) -> Model:
    """A detector and a tracker on one tower, each with necks of its own."""
    found, followed = config.part("detector_config"), config.part("tracker_config")
    vision, necks, width = _seen(found.part("vision_config"))
    again = [replace(neck, name=f"tracker_{neck.name.removeprefix('vision_')}") for neck in necks]
    memory, more = remembering(followed, width)
    following = [*mask_decoder(followed, width, width + more), memory]
    following[0] = replace(following[0], name="tracker_decoder")
    following[1] = replace(following[1], name="tracker_upscaling")
    model = _model(name, (vision, necks, width), _detecting(found))
    edges = [edge("vision", neck.name, "input") for neck in again]
    edges += [edge(again[2].name, module.name, "input") for module in following]
    return replace(model, modules=(*model.modules, *again, *following), edges=(*model.edges, *edges))


def vision_alone(config: Fields, name: str) -> Model:
    return _model(name, _seen(config), ([], []))


def _model(
    name: str, seen: tuple[ModelModule, list[ModelModule], int], parts: tuple[list[ModelModule], list[ModelModule]]
) -> Model:
    """What reads the neck of the tower's own scale, and what reads words."""
    vision, necks, _ = seen
    behind, words = parts
    edges = [edge("vision", neck.name, "input") for neck in necks]
    model = apart(name, tuple(words)) if words else Model(name=name, modules=(), edges=())
    for module in behind:
        before = {"detr_decoder": "detr_encoder", "pixel_decoder": "detr_encoder"}.get(module.name, necks[2].name)
        edges.append(edge(before, module.name, "input"))
    return Model(name=name, modules=(vision, *necks, *behind, *model.modules), edges=(*edges, *model.edges))


def _seen(fields: Fields) -> tuple[ModelModule, list[ModelModule], int]:
    """The tower, and necks that scale its rows by 4, 2, 1 and a half."""
    inner, width = fields.part("backbone_config"), fields.count("fpn_hidden_size")
    shape = vit(inner, final_norm=False, norm_first_extra=True)
    if inner.get("layer_scale_init_value") is not None:
        shape = replace(shape, layer_scale=True)
    near = inner.count("window_size", most=10_000)
    listed = inner.get("global_attn_indexes")
    whole = tuple(range(7, shape.layers, 8)) if listed is None else inner.indices("global_attn_indexes", shape.layers)
    shape = replace(shape, window_tokens=near**2, global_layers=whole)
    rows = (inner.side("pretrain_image_size") // inner.side("patch_size")) ** 2
    look = replace(fixed(inner, bias=False), learned_positions=False, position_rows=rows)
    vision = vision_module(shape, look)
    scales = list(SCALES) if fields.get("scale_factors") is None else fields.get("scale_factors")
    if scales != list(SCALES):
        raise fields.error("scale_factors", f"expected {list(SCALES)}, found {scales!r:.60}")
    wide = shape.hidden
    half, quarter = wide // 2, wide // 4

    def grown(size: int) -> Convolve:
        return Convolve(width=size, taps=4, spreads=4, transposed=True)

    firsts: tuple[Steps, ...] = (
        (grown(half), Active(), grown(quarter)),
        (grown(half),),
        (),
        (Average(rows=4),),
    )
    necks = [
        stepping((*first, Dense(width=width), conv(width, 3)), (wide, width), name=f"vision_neck{index}")
        for index, first in enumerate(firsts)
    ]
    return vision, necks, width


def _lite(text: Fields) -> ModelModule:
    """Words that see both sides; the first and the last block mix neighbours by a depthwise convolution (RepMixer,
    arXiv 2303.14189)."""
    words = text_tower(text, causal=False)
    assert words.transformer is not None
    layers, width = words.transformer.layers, words.transformer.hidden
    if not text.flag("use_repmixer_blocks"):
        return words
    near = Convolve(width=width, taps=text.count("repmixer_kernel_size", most=10_000), groups=width, bias=False)
    scale = Kept(size=width)
    three = Fork(left=(Fork(left=(near, Normed()), right=(Normed(),)),), right=(Normed(),))
    mixing: Steps = (residual(three, scale), residual(near, Normed(), Mlp(), scale))
    blocks = tuple((1, mixing if index in (0, layers - 1) else (Usual(),)) for index in range(layers))
    return replace(words, form=Form(blocks=blocks))


def _detecting(config: Fields) -> tuple[list[ModelModule], list[ModelModule]]:
    text = config.part("text_config")
    words = _lite(text) if text.kind == "sam3_lite_text_text_model" else text_tower(text, causal=True)
    fields, decoding = config.part("detr_encoder_config"), config.part("detr_decoder_config")
    masks, shapes = config.part("mask_decoder_config"), config.part("geometry_encoder_config")
    width = fields.count("hidden_size")
    for one in (decoding, masks, shapes):
        one.same("hidden_size", width, "the encoder's width")
    own = 4 * width * (width + 1)
    # image rows ask words: their keys and values are kept
    asked: Steps = (residual(Normed(), Dense(width=width), Dense(width=width)), Kept(size=2 * width * (width + 1)))
    heads, ffn, layers = (
        fields.count("num_attention_heads"),
        fields.count("intermediate_size"),
        fields.layers("num_layers"),
    )
    shape = replace(querying(width, heads, ffn, layers, width), cross_layers=(), cross_width=None)
    block: Steps = (residual(Normed(), Attend()), *asked, residual(Normed(), Mlp()))
    encoder = encoder_module(shape, Form(blocks=((layers, block),)), name="detr_encoder")
    count, depth = decoding.count("num_queries"), decoding.layers("num_layers")
    heads, ffn = decoding.count("num_attention_heads"), decoding.count("intermediate_size")
    steps: Steps = (
        *(residual(Attend()), Normed(), residual(Dense(width=width), Dense(width=width))),
        *(
            Kept(size=2 * width * (width + 1)),
            Normed(),
            residual(Attend(across=True)),
            Normed(),
            residual(Mlp()),
            Normed(),
        ),
    )
    stored = 2 * width + mlp(width, width, 4, 3) + 4 * count + width + mlp(width, width, 1, 3) + 2 * width
    stored += (2 * width + 1) * width + (width + 1) * width + 2 * (3 * width + (width + 1) * heads)
    decoder = encoder_module(
        querying(width, heads, ffn, depth, width),
        Form(blocks=((depth, steps),), queries=count),
        name="detr_decoder",
        stored=stored,
    )
    blocks = shapes.layers("num_layers")
    wide = shapes.count("intermediate_size")
    geometry = 3 * width + 5 * width + (shapes.count("roi_size", most=99) ** 2 * width + 1) * width
    geometry += (width + 3) * width + 6 * width + width * (width + 1)
    geometry += blocks * (2 * own + 2 * width * wide + wide + width + 6 * width)
    scoring = 2 * width * ffn + ffn + width + 2 * width + 2 * width * (width + 1)
    once = 3 * width * (width + 1) + width * (width + 1) + width + 1 + own + 2 * width
    stages = masks.count("num_upsampling_stages", most=16)
    grown: Steps = (Convolve(width=width, taps=9, spreads=4), Normed(), Active()) * stages
    pixels = stepping((*grown, Kept(size=once)), (width, width), name="pixel_decoder")
    out = text.count("projection_dim")
    ends = projector_module((words.output_width, width), name="text_projector", modality="text")
    ends = replace(ends, stored=out * words.output_width + geometry + scoring)
    config.log.notes.append("geometry_encoder_config, scores: prompts are a few rows, whose weights have no work here")
    return [encoder, decoder, pixels], [words, ends]
