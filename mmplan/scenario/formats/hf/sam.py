"""SAM's tower (arXiv 2304.02643), the necks behind it, and the families that read pages with it."""

from dataclasses import replace

from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import tower_of
from mmplan.scenario.formats.hf.vit import fixed, vision_module, vit
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import chain, edge, merged, projector_module, stepping
from mmplan.scenario.scenario import Model, ModelEdge, ModelModule
from mmplan.scenario.steps import Active, Dense, Form, Kept, Normed, Steps, Usual, conv


def tower(fields: Fields, name: str = "vision") -> ModelModule:
    """Attention in windows but for some layers; tables of relative positions, whose products are not counted."""
    side, near = fields.side("image_size") // fields.side("patch_size"), fields.count("window_size", least=0)
    ffn = fields.optional("mlp_dim") or int(fields.count("hidden_size") * fields.ratio("mlp_ratio"))
    shape = vit(fields, ffn=ffn, qkv_bias=fields.flag("qkv_bias"), final_norm=False)
    whole = fields.indices("global_attn_indexes", shape.layers)
    if near:
        shape = replace(shape, window_tokens=near**2, global_layers=whole)
    vision = fixed(fields)
    if not fields.flag("use_abs_pos"):
        vision = replace(vision, learned_positions=False)
    form = None
    if fields.flag("use_rel_pos"):

        def block(index: int) -> Steps:
            rows = side if index in whole or not near else near
            return (Usual(), Kept(size=2 * (2 * rows - 1) * shape.head_dim))

        form = Form(blocks=tuple((1, block(index)) for index in range(shape.layers)))
    return replace(vision_module(shape, vision), name=name, form=form)


def neck_steps(channels: int) -> Steps:
    """Two convolutions without bias, each with a norm."""
    return (conv(channels, 1, bias=False), Normed(), conv(channels, 3, bias=False), Normed())


def got_ocr(config: Fields, name: str) -> Model:
    """Two convolutions of stride 2 and a linear behind the neck."""
    fields = config.part("vision_config")
    vision, llm = tower(fields), text_module(config, "text_config")
    channels = fields.count("output_channels")
    neck = stepping(neck_steps(channels), (vision.output_width, channels), name="vision_neck")
    widths = 2 * channels, llm.output_width
    steps: Steps = (*(conv(width, 3, stride=2, bias=False) for width in widths), Dense(width=llm.output_width))
    return chain(name, vision, neck, stepping(steps, (channels, llm.output_width), name="projector", merge=16), llm)


def deepseek_hybrid(config: Fields, name: str) -> Model:
    """SigLIP beside SAM, whose page is scaled to four times SigLIP's grid; both are projected side by side and then
    together, which is priced as a sum."""
    near, llm = tower_of(config), text_module(config, "text_config")
    fields = config.part("high_res_vision_config")
    far, channels = tower(fields, "vision_high"), fields.count("output_channels")
    assert near.vision is not None and near.vision.image_size is not None
    assert far.vision is not None and far.vision.image_size is not None
    side, wide = near.vision.image_size // near.vision.patch, far.vision.image_size // far.vision.patch
    width, half = llm.output_width, llm.output_width // 2
    if side != 24:
        config.log.notes.append(f"SAM's features have 24 x 24 tokens, those of the other tower {side} x {side}")
    neck = stepping(neck_steps(channels), (far.output_width, channels), name="vision_high_neck")
    second = far.output_width * channels + 9 * channels**2 + 4 * channels + 1
    scaled = replace(conv(2 * channels, 3, bias=False), joins=wide**2, spreads=48**2)
    steps: Steps = (
        Kept(size=second),
        scaled,
        conv(4 * channels, 3, stride=2, bias=False),
        Dense(width=half),
        Active(),
        Dense(width=width, bias=False),
    )
    beside = stepping(steps, (channels, width), name="high_projector")
    plain = projector_module((near.output_width, half, width))
    model = merged(name, llm, (near, plain))
    added = ModelEdge(producer=beside.name, consumer=llm.name, kind="add", consumer_layer=0)
    inner = (edge(far.name, neck.name, "input"), edge(neck.name, beside.name, "input"), added)
    config.log.notes.append("the tokens of the two towers are added behind the first block, not in front of it")
    return replace(model, modules=(*model.modules[:-1], far, neck, beside, llm), edges=(*model.edges, *inner))
