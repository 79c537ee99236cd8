"""BERTs that read more than words: patches (ViLT), regions that a detector found (VisualBERT, LXMERT), the rows of
convolutions (TVP), the rows of two towers (FLAVA, BridgeTower).

What depends on one number of a row, or on one row of a sequence, is kept and its products are not counted.
"""

from dataclasses import replace

from mmplan.scenario.formats.hf.convnets import resnet
from mmplan.scenario.formats.hf.pairs import bert_tower, pooler
from mmplan.scenario.formats.hf.vit import bare, fixed, vision_module, vit
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import edge, merged, projector_module, stepping
from mmplan.scenario.scenario import Model, ModelEdge, ModelModule, TextInput, VisionInput, Vocabulary
from mmplan.scenario.steps import Active, Attend, Dense, Form, Kept, Mlp, Normed, Steps, conv, residual

REGIONS = 6  # 6 x 6 regions of an image (arXiv 1908.07490, section 3.1; arXiv 1908.03557, section 3)


def patches(width: int, seen: VisionInput, *, front: Steps | None = None, stored: int = 0) -> ModelModule:
    """A tower without blocks: one linear, or `front`, on each patch."""
    raw = seen.channels * seen.patch**2
    shape, form = bare(width, (Dense(width=width),) if front is None else front, raw)
    return replace(vision_module(shape, seen, stored), form=form)


def transform(width: int) -> int:
    """A linear and a norm in front of a head for masked words."""
    return width * width + 3 * width


def masked_words(text: ModelModule, fields: Fields, *, stored: int = 0, biases: int = 2) -> ModelModule:
    """The same encoder as a language model: a head for masked words behind it, with `biases` where it is not tied."""
    assert text.vocabulary is not None
    tied = fields.get("tie_word_embeddings") is not False
    size, width = text.vocabulary.size, text.output_width
    stored += text.stored + transform(width) + size * (1 if tied else biases)
    return replace(text, name="llm", kind="language_model", vocabulary=Vocabulary(size=size, tied=tied), stored=stored)


def vilt(config: Fields, name: str) -> Model:
    """Patches of an image stand beside words in a ViT."""
    seen = fixed(config, class_token=True)
    assert seen.image_size is not None
    width = config.count("hidden_size")
    rows = (seen.image_size // seen.patch) ** 2 + 2
    stored = config.count("modality_type_vocab_size") * width + pooler(width)
    text = bert_tower(config, pre=True, qkv_bias=config.flag("qkv_bias"), stored=stored)
    seen = replace(seen, keep_class_token=True)
    return merged(name, text, (patches(width, seen, stored=rows * width),))


def visual_bert(config: Fields, name: str) -> Model:
    """Regions of an image stand behind words; a head for masked words."""
    config.refuse_unless("bypass_transformer", False, None, why="a further block joins words and regions")
    width, inputs = config.count("hidden_size"), config.count("visual_embedding_dim")
    rows = config.count("type_vocab_size") + config.count("max_position_embeddings", most=100_000_000)
    seen = VisionInput(patch=1, channels=inputs, image_size=REGIONS)
    text = masked_words(bert_tower(config, stored=pooler(width)), config, stored=2 * width + 2)
    return merged(name, text, (patches(width, seen, stored=rows * width),))


def lxmert(config: Fields, name: str) -> Model:
    """Blocks for words, blocks for regions, then blocks in which each attends to the other with the same weights: those
    of words attend to regions, and regions to themselves; the way back is not counted."""
    width, regions = config.count("hidden_size"), config.count("visual_feat_dim")
    text = bert_tower(replace(config, values={**config.values, "num_hidden_layers": 1}), stored=pooler(width))
    assert text.transformer is not None
    own, across, seen = config.layers("l_layers"), config.layers("x_layers"), config.layers("r_layers")
    usual: Steps = (residual(Attend()), Normed(), residual(Mlp()), Normed())
    both: Steps = (residual(Attend(across=True)), Normed(), *usual)
    plain = text.transformer
    shape = replace(plain, layers=own + across, cross_layers=tuple(range(own, own + across)), cross_width=width)
    text = replace(text, transformer=shape, form=Form(blocks=((own, usual), (across, both))))
    labels = config.count("num_qa_labels") if config.flag("task_qa") else 0
    stored = 2 * width + 2
    stored += 2 * width * width + 6 * width + (2 * width + 1) * labels if labels else 0
    objects = 0
    if config.flag("task_obj_predict"):
        objects = transform(width)
        for flag, key in (("obj", "num_object_labels"), ("attr", "num_attr_labels"), ("feat", "visual_feat_dim")):
            objects += (width + 1) * config.count(key) if config.flag(f"visual_{flag}_loss") else 0
    llm = masked_words(text, config, stored=stored + objects, biases=1)
    blocks = replace(plain, layers=seen + across)
    embed: Steps = (Dense(width=width), Normed(), Kept(size=(config.count("visual_pos_dim") + 3) * width))
    view = VisionInput(patch=1, channels=regions, image_size=REGIONS)
    vision = replace(vision_module(blocks, view), form=Form(front=embed, raw_width=regions))
    return Model(name=name, modules=(vision, llm), edges=(edge("vision", "llm", "cross_attention"),))


def flava(config: Fields, name: str) -> Model:
    """Two encoders, one over the rows of both, heads for masked words and patches behind each; the patches' targets are
    codes of a convolutional network."""
    fields, eye, both = config.part("text_config"), config.part("image_config"), config.part("multimodal_config")
    width = fields.count("hidden_size")
    text = bert_tower(fields, pre=True, qkv_bias=fields.flag("qkv_bias"), stored=pooler(width))
    seen = replace(fixed(eye, class_token=True), keep_class_token=True)
    shape = vit(eye, qkv_bias=eye.flag("qkv_bias"))
    vision = vision_module(shape, seen, pooler(shape.hidden) + (shape.hidden if eye.flag("mask_token") else 0))
    joint = vit(both, qkv_bias=both.flag("qkv_bias"))
    inner = joint.hidden
    for one in (config, eye, both):
        one.same("hidden_size", width, "the text encoder's width")
    compared = config.count("projection_dim")
    once = (shape.hidden + width + 2) * compared + 1 + pooler(inner) + 2 * inner + 2 + pooler(inner)
    token = both.flag("use_cls_token")
    fusion = replace(
        text,
        name="fusion",
        transformer=joint,
        vocabulary=Vocabulary(size=1, elsewhere=not token),
        text=TextInput(tokens=1, positions="none"),
        stored=once,
    )
    seen_of = projector_module((shape.hidden, inner), name="vision_projector")
    codes, words = eye.count("vocab_size"), fields.count("vocab_size")
    if config.get("tie_word_embeddings") is False:
        fusion = replace(fusion, stored=once + 2 * (codes + words))  # two biases in each head
    heads = [("text", words), ("vision", codes), ("fusion", words), ("fusion", codes)]
    tails = tuple(
        stepping(
            (Dense(width=size), Active(), Normed(), Dense(width=count)), (size, count), name=f"{reader}_head{index}"
        )
        for index, (reader, count) in enumerate(heads)
        for size in [{"text": width, "vision": shape.hidden, "fusion": inner}[reader]]
    )
    edges = [
        edge("vision", "vision_projector", "input"),
        edge("vision_projector", "fusion", "merge"),
        edge("text", "fusion", "hidden"),
        *(edge(reader, tail.name, "input") for (reader, _), tail in zip(heads, tails, strict=True)),
    ]
    modules = (vision, seen_of, text, fusion, *tails)
    if not config.flag("init_codebook"):
        return Model(name=name, modules=modules, edges=tuple(edges))
    book = config.part("image_codebook_config")
    config.log.notes.append("image_codebook: its convolutions are frozen in training and have no work here")
    return Model(name=name, modules=(*modules[:-1], replace(tails[-1], stored=_codebook(book))), edges=tuple(edges))


def _codebook(book: Fields) -> int:
    """DALL-E's encoder: groups of residual blocks, each group twice as wide."""
    width = book.count("hidden_size")
    blocks, channels = book.count("num_blocks_per_group", most=1_000), book.count("input_channels", most=1_000)
    total, before = channels * 49 * width + width, width
    for group in range(4):
        wide = width * 2**group
        for _ in range(blocks):
            inner = wide // 4
            total += (before + 2 * inner) * inner * 9 + 3 * inner + (inner + 1) * wide
            total += (before + 1) * wide if before != wide else 0
            before = wide
    return total + (before + 1) * book.count("vocab_size")


def bridgetower(config: Fields, name: str) -> Model:
    """Two encoders; blocks over both read a layer of each. Words and regions pass weights of their own, which
    work as much as one set on all rows; the two attentions, to own rows and to others, are priced over all rows."""
    fields, eye = config.part("text_config"), config.part("vision_config")
    width, layers = config.count("hidden_size"), config.layers()
    fields.same("hidden_size", width, "the width of blocks over both towers")
    eye = replace(eye, defaults={**eye.defaults, "num_attention_heads": eye.count("hidden_size") // 64})
    shape = vit(eye, ffn=4 * eye.count("hidden_size"), norm_first_extra=True)
    more = 0 if eye.flag("share_layernorm") else 2 * shape.layers * shape.hidden
    if eye.flag("remove_last_layer"):
        shape = replace(shape, layers=shape.layers - 1)
    seen = replace(fixed(eye, bias=False, class_token=True), keep_class_token=True)
    vision = vision_module(shape, seen, more)
    text = bert_tower(fields, stored=pooler(fields.count("hidden_size")))
    shared = config.flag("share_cross_modal_transformer_layers")
    again = 0 if shared else (layers - 1)
    once = 4 * width
    assert text.transformer is not None
    heads = config.count("num_attention_heads")
    ffn = fields.count("intermediate_size")
    joint = replace(text.transformer, layers=layers, hidden=width, heads=heads, kv_heads=heads, ffn=ffn)
    joint = replace(joint, head_dim=width // heads)
    block = 8 * width * (width + 1) + 2 * width * ffn + ffn + width + 6 * width
    links = 1 if config.flag("share_link_tower_layers") else layers - 1
    scale = 0 if config.word("link_tower_type", ("add", "scaled_add", "interpolate")) == "add" else 1
    steps: Steps = (residual(Attend()), Normed(), residual(Attend()), Normed(), residual(Mlp()), Normed())
    form = Form(blocks=((layers, (*steps, Kept(size=block))),))
    stored = once + 2 * pooler(width) + 2 * links * (2 * width + scale)
    stored += again * (text.output_width + shape.hidden + 2) * width
    fusion = replace(
        text,
        name="fusion",
        transformer=joint,
        vocabulary=Vocabulary(size=2),  # kinds of tokens
        text=TextInput(tokens=0, positions="none"),
        stored=stored,
        form=form,
    )
    linked = projector_module((shape.hidden, width), name="vision_projector")
    edges: list[ModelEdge] = [
        edge("vision", "vision_projector", "input"),
        edge("vision_projector", "fusion", "merge"),
        edge("text", "fusion", "hidden"),
    ]
    return Model(name=name, modules=(vision, linked, text, fusion), edges=tuple(edges))


def tvp(config: Fields, name: str) -> Model:
    """A ResNet whose averaged frames stand behind words (arXiv 2303.04995). Learned borders of frames are kept."""
    stages, width = resnet(config.part("backbone_config")), config.count("hidden_size")
    last = stages[-1].output_width
    side, edge_of = config.count("max_img_size", most=100_000), config.count("visual_prompt_size", most=100_000)
    frames = 3 * config.count("num_frames", most=100_000)
    if config.word("visual_prompter_type", ("framepad", "framedownpad")) == "framepad":
        border = 2 * edge_of * (2 * side - 2 * edge_of)
    else:
        config.refuse_unless("visual_prompter_type", "framepad", why="transformers cannot build it")
        border = edge_of * side
    places = config.count("max_grid_row_position_embeddings") + config.count("max_grid_col_position_embeddings")
    rows = config.count("max_position_embeddings", most=100_000_000) + places + 3
    grid = stepping((conv(width, 3, bias=False), Kept(size=rows * width)), (last, width), name="vision_grid")
    text = bert_tower(config, stored=pooler(width) + 10 * width + frames * border)
    return merged(name, text, (*stages, grid))
