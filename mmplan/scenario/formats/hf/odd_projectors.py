"""Families whose tower is a known one and whose projector, or whose blocks, are of their own kind."""

from dataclasses import replace

from mmplan.scenario.formats.hf.resamplers import encoder_module, qformer, querying
from mmplan.scenario.formats.hf.text import language_module, text_module
from mmplan.scenario.formats.hf.towers import tower_of
from mmplan.scenario.formats.hf.vit import bare, vision_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import chain, edge, merged, projector_module, stepping
from mmplan.scenario.scenario import Model, ModelEdge, ModelModule, TextInput, VisionInput
from mmplan.scenario.steps import Active, Attend, Convolve, Dense, Fork, Form, Join, Kept, Normed, Step, Steps


def fuyu(config: Fields, name: str) -> Model:
    """No tower: patches pass one linear."""
    patch, channels = config.side("patch_size"), config.count("num_channels", most=1_000)
    llm = text_module(config, "text_config")
    shape, form = bare(llm.output_width, (Dense(width=llm.output_width),), channels * patch**2)
    vision = replace(vision_module(shape, VisionInput(patch=patch, channels=channels)), form=form)
    return merged(name, llm, (vision,))


def video_llava(config: Fields, name: str) -> Model:
    """A tower for images and one for frames, of the same sizes: images and frames are priced through one."""
    vision, llm = tower_of(config), text_module(config, "text_config")
    assert vision.transformer is not None and vision.vision is not None and vision.vision.image_size is not None
    keep = config.get("vision_feature_select_strategy") == "full"
    shape, eye = vision.transformer, vision.vision
    side, width = vision.vision.image_size // eye.patch, shape.hidden
    blocks = shape.layers * (4 * width * width + 9 * width + 2 * width * shape.ffn + shape.ffn)
    again = blocks + eye.channels * eye.patch**2 * width + (side**2 + 2) * width + 4 * width
    vision = replace(vision, vision=replace(eye, keep_class_token=keep), stored=again)
    config.log.notes.append("the tower of frames has weights here and no work: frames are priced as images")
    bias, dims = config.get("multimodal_projector_bias"), (width, llm.output_width, llm.output_width)
    return chain(name, vision, projector_module(dims, bias=bias), llm)


def ernie(config: Fields, name: str) -> Model:
    """ERNIE 4.5 VL: tokens joined 2 x 2, then pairs of frames (an image twice); an MLP and a norm behind each."""
    vision, tower, llm = tower_of(config), config.part("vision_config"), text_module(config, "text_config")
    merge, frames = tower.count("spatial_merge_size", most=100) ** 2, tower.count("temporal_merge_size", most=100)
    joined = vision.output_width * merge
    both: Steps = (
        Join(rows=merge),
        *(Dense(width=joined), Active(), Dense(width=joined), Normed()),
        Dense(width=joined, bias=False),  # of an image the first frame's columns ...
        Kept(size=(frames - 1) * joined * joined + joined),  # ... the others' are kept
        *(Active(), Dense(width=joined), Normed()),
        *(Dense(width=llm.output_width), Normed(kind="rms")),
    )
    return chain(
        name, vision, stepping(both, (vision.output_width, llm.output_width), name="projector", merge=merge), llm
    )


def hunyuan(config: Fields, name: str) -> Model:
    """HunYuan-VL: a convolution joins tokens, two linears follow; learned ends of rows and images."""
    vision, tower = tower_of(config), config.part("vision_config")
    llm, side = text_module(config, "text_config", flat=True), tower.count("spatial_merge_size", most=100)
    width, hidden = llm.output_width, vision.output_width
    steps: Steps = (
        Normed(kind="rms"),
        Convolve(width=2 * hidden, taps=side**2, joins=side**2),
        *(Active(), Dense(width=4 * hidden), Dense(width=width), Normed(kind="rms")),
        Kept(size=4 * hidden + 3 * width),
    )
    return chain(name, vision, stepping(steps, (hidden, width), name="projector", merge=side**2), llm)


def hunyuan4(config: Fields, name: str) -> Model:
    """Hunyuan 4: a norm, a convolution that joins tokens, a linear; a learned end of each row."""
    vision, tower = tower_of(config), config.part("vision_config")
    llm, merge = text_module(config, "text_config"), tower.count("spatial_merge_size", most=100) ** 2
    hidden, width = vision.output_width, tower.count("out_hidden_size")
    joined = Convolve(width=merge * hidden, taps=merge, joins=merge)
    steps: Steps = (Normed(kind="rms"), joined, Active(), Dense(width=width), Kept(size=width))
    return chain(name, vision, stepping(steps, (hidden, width), name="projector", merge=merge), llm)


def lfm3(config: Fields, name: str) -> Model:
    vision, tower, llm = tower_of(config), config.part("vision_config"), text_module(config, "text_config")
    merge, bias = tower.count("spatial_merge_size", most=100) ** 2, config.get("projector_bias")
    dims = (vision.output_width * merge, config.count("projector_hidden_size"), llm.output_width)
    return chain(name, vision, projector_module(dims, merge=merge, norm="layer", norm_first=True, bias=bias), llm)


def molmo2(config: Fields, name: str) -> Model:
    """Each square of tokens, of two layers of the tower side by side, is read by its mean; a gated MLP."""
    vision, llm = tower_of(config), text_module(config, "text_config")
    fields = config.part("adapter_config")
    width, layers = fields.count("hidden_size"), fields.get("vision_feature_layer")
    many = 2 if layers is None else len(layers) if isinstance(layers, list) else 1
    heads = fields.count("num_attention_heads")
    head_dim = fields.optional("head_dim") or width // heads
    if many < 2 or width != vision.output_width:
        message = f"expected two layers or more of a tower of width {width}, found {many} of {vision.output_width}"
        raise fields.error("vision_feature_layer", message)
    bias = fields.get("attention_bias") is not False
    shape = querying(width, heads, 1, 1, vision.output_width, head_dim)
    shape = replace(shape, qkv_bias=bias, out_bias=bias)
    stored = 3 * heads * head_dim * (many - 1) * width - width  # the query is a mean and no number of its own
    form = Form(blocks=((1, (Attend(across=True),)),), queries=1, window=4)
    pooled = encoder_module(shape, form, name="pooling", stored=stored)
    config.log.notes.append("the mean of each 2 x 2 tokens asks; that of one layer of several is counted as work")
    outer = fields.optional("text_hidden_size") or llm.output_width
    if outer != llm.output_width:
        message = f"the adapter gives width {outer}, the language model has hidden size {llm.output_width}"
        raise fields.error("text_hidden_size", message)
    inner = fields.count("intermediate_size")
    last = projector_module((width, inner, outer), gated=True, bias=fields.flag("mlp_bias"))
    return chain(name, vision, pooled, last, llm)


def granite4(config: Fields, name: str) -> Model:
    """Granite 4 Vision: squares of tokens of several layers of the tower are read by queries each and added to the
    image's places in several blocks; four more sets of queries read every fourth token."""
    vision, llm = tower_of(config), text_module(config, "text_config")
    assert vision.transformer is not None and llm.transformer is not None
    rate = config.get("downsample_rate")
    sides = [int(side) for side in rate.split("/") if side.isdigit()] if isinstance(rate, str) else []
    if len(sides) != 2 or not 0 < sides[0] <= sides[1] <= 1_000:
        raise config.error("downsample_rate", f"expected a ratio like '1/2' or '3/8', found {rate!r:.40}")
    width, hidden = llm.output_width, vision.output_width
    query = config.part("qformer_config")
    given = {**query.values, "hidden_size": hidden, "num_attention_heads": max(1, hidden // 64)}
    query = replace(query, values={**given, "encoder_hidden_size": hidden})
    ways = [(_layer(vision, source), target) for source, target in _pairs(config, "deepstack_layer_map")]
    targets = config.get("spatial_target_layers")
    if not (targets is None or (isinstance(targets, list) and len(targets) == 4)):
        raise config.error("spatial_target_layers", "expected four blocks, one for each corner of 2 x 2 tokens")
    last = _layer(vision, config.get("spatial_vision_layer"))
    ways += [(last, target) for target in ([12, 15, 18, 21] if targets is None else targets)]
    for _, target in ways:
        if not isinstance(target, int) or not 0 <= target < llm.transformer.layers:
            found = f"block {target!r:.20} of {llm.transformer.layers}"
            raise config.error("deepstack_layer_map", f"features are added to {found}, which does not exist")
    (first, _), *others = ways
    again = len(others)
    asked = qformer(query, queries=sides[0] ** 2, context=hidden, window=sides[1] ** 2, name="queries")
    assert asked.form is not None and asked.transformer is not None
    places = Kept(size=sides[1] ** 2 * hidden)
    normed = stepping((Normed(), places), (hidden, hidden), name="norm")
    one = projector_module((hidden, width), stored=width)  # and the learned end of a row
    modules = [vision, normed, asked, one]
    edges = [
        ModelEdge(producer="vision", consumer="norm", kind="input", producer_layer=first),
        edge("norm", "queries", "input"),
        edge("queries", "projector", "input"),
        edge("projector", "llm", "merge"),
    ]
    if again:
        shape, plain = asked.transformer, asked.form
        layers = shape.layers
        cross = tuple(layers * index + one for index in range(again) for one in shape.cross_layers)
        shape = replace(shape, layers=layers * again, cross_layers=cross)
        more = again - 1  # sets of queries and norms beyond the first of this module
        blocks = tuple(plain.blocks * again)
        form = replace(plain, blocks=blocks)
        stored = more * (sides[0] ** 2 * hidden + 2 * hidden)
        dense: Step = Dense(width=width)
        for _ in range(more):
            dense = Fork(left=(dense,), right=(Dense(width=width),))
        modules += [
            stepping((Normed(), places) * again, (hidden, hidden), name="norms"),
            encoder_module(shape, form, name="more_queries", stored=stored),
            stepping((dense,), (hidden, width), name="more_projectors"),
        ]
        after = max(0, min(target for _, target in others) - 1)
        edges += [edge("vision", "norms", "input"), edge("norms", "more_queries", "input")]
        edges.append(edge("more_queries", "more_projectors", "input"))
        edges.append(ModelEdge(producer="more_projectors", consumer="llm", kind="add", consumer_layer=after))
        config.log.notes.append(
            f"{again} further sets of queries stand in one module, whose result is added once, behind block {after}"
        )
    return Model(name=name, modules=(*modules, llm), edges=tuple(edges))


def _layer(vision: ModelModule, index: object) -> int | None:
    """Block whose tokens hidden state `index` is; None for the last."""
    assert vision.transformer is not None
    layers = vision.transformer.layers
    block = layers - 1 if not isinstance(index, int) else index + layers if index < 0 else index - 1
    return None if block >= layers - 1 else max(0, block)


def _pairs(config: Fields, key: str) -> list[tuple[int, int]]:
    value = config.get(key)
    good = isinstance(value, list) and 0 < len(value) <= 100
    if not good or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise config.error(key, "expected pairs of a layer of the tower and a block of the language model")
    return [(pair[0], pair[1]) for pair in value]


def cosmos3_edge(config: Fields, name: str) -> Model:
    vision, tower, llm = tower_of(config), config.part("vision_config"), text_module(config, "text_config", tied=False)
    merge = tower.count("spatial_merge_size", most=100) ** 2
    dims = (vision.output_width * merge, config.count("projector_hidden_size"), llm.output_width)
    return chain(name, vision, projector_module(dims, merge=merge, norm="layer", norm_first=True), llm)


def modernvbert(config: Fields, name: str) -> Model:
    """Tokens joined, one linear into a text encoder whose blocks see both sides."""
    vision, text = tower_of(config), config.part("text_config")
    merge = config.count("pixel_shuffle_factor", most=100) ** 2
    words = language_module(text, tied=True)
    words = replace(words, kind="text_encoder", text=TextInput(positions="rotary"))
    dims = (vision.output_width * merge, words.output_width)
    return chain(name, vision, projector_module(dims, merge=merge, bias=False), words)


def ultravbert(config: Fields, name: str) -> Model:
    """The same with a norm behind the linear."""
    vision, words = tower_of(config), language_module(config.part("text_config"), tied=True)
    words = replace(words, kind="text_encoder", text=TextInput(positions="rotary"))
    merge, width = config.count("pixel_shuffle_factor", most=100) ** 2, words.output_width
    steps: Steps = (Join(rows=merge), Dense(width=width, bias=False), Normed(kind="rms"))
    return chain(name, vision, stepping(steps, (vision.output_width, width), name="projector", merge=merge), words)
