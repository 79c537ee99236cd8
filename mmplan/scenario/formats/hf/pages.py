"""Readers of pages: words with the boxes or paths where they stand, and patches of the page (LayoutLM, LayoutLMv3,
LiLT, BROS, MarkupLM, UDOP). Tables of places are kept; what is looked up there is not counted."""

from dataclasses import replace

from mmplan.scenario.formats.hf.decoders import decoder
from mmplan.scenario.formats.hf.fusion import masked_words, patches
from mmplan.scenario.formats.hf.pairs import bert_tower, pooler
from mmplan.scenario.formats.hf.vit import fixed
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import SOURCE, edge, merged
from mmplan.scenario.scenario import Model, ModelModule, TextInput, Transformer, VisionInput, Vocabulary


def layoutlm(config: Fields, name: str) -> Model:
    """Boxes of words are rows of four tables."""
    width = config.count("hidden_size")
    boxes = 4 * config.count("max_2d_position_embeddings") * width
    text = masked_words(bert_tower(config, stored=boxes + pooler(width)), config)
    return Model(name=name, modules=(text,), edges=())


def layoutlmv3(config: Fields, name: str) -> Model:
    """Patches of the page stand behind its words."""
    width = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    boxes = 2 * config.count("max_2d_position_embeddings")
    stored = boxes * (config.count("coordinate_size") + config.count("shape_size"))
    if config.flag("has_relative_attention_bias"):
        stored += config.count("rel_pos_bins") * heads
    if config.flag("has_spatial_attention_bias"):
        stored += 2 * config.count("rel_2d_pos_bins") * heads
    config.refuse_unless("text_embed", True, why="there are no words")
    if not config.flag("visual_embed"):
        return Model(name=name, modules=(bert_tower(config, stored=stored),), edges=())
    patch, side = config.side("patch_size"), config.count("input_size", most=100_000)
    seen = VisionInput(
        patch=patch,
        channels=config.count("num_channels", most=1_000),
        image_size=side // patch * patch,
        class_token=True,
        keep_class_token=True,
    )
    rows = (side // patch) ** 2 + 2
    text = bert_tower(config, stored=stored + 2 * width)  # a norm behind words and patches
    return merged(name, text, (patches(width, seen, stored=rows * width + 2 * width),))


def bros(config: Fields, name: str) -> Model:
    """Distances of boxes, of each pair of words, weigh attention."""
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    sinusoids = width // 4 // config.count("dim_bbox") * config.count("dim_bbox")
    config.log.notes.append("the linear on pairs of boxes has weights and no work")
    text = bert_tower(config, stored=sinusoids * (width // heads) + pooler(width))
    return Model(name=name, modules=(text,), edges=())


def markuplm(config: Fields, name: str) -> Model:
    """Paths of nodes in a page's tree: tables for each depth, two linears."""
    width, inner = config.count("hidden_size"), config.count("xpath_unit_hidden_size")
    depth = config.count("max_depth", most=1_000)
    rows = config.count("max_xpath_tag_unit_embeddings") + config.count("max_xpath_subs_unit_embeddings")
    wide = depth * inner
    paths = rows * wide + wide * width + width + wide * 4 * width + 4 * width + 4 * width * width + width
    config.log.notes.append("the linears on paths have weights and no work")
    text = bert_tower(config, stored=paths + pooler(width))
    return Model(name=name, modules=(text,), edges=())


def lilt(config: Fields, name: str) -> Model:
    """A narrow encoder of boxes beside the one of words; each adds its scores to the other's, which is not counted."""
    width, shrink = config.count("hidden_size"), config.count("channel_shrink_ratio", most=10_000)
    narrow, table, rows = width // shrink, width // 6, config.count("max_2d_position_embeddings")
    text = bert_tower(config, stored=pooler(width))
    heads, ffn = config.count("num_attention_heads"), config.count("intermediate_size")
    if narrow % heads or ffn % shrink:
        raise config.error("channel_shrink_ratio", f"{narrow} columns are not a multiple of {heads} heads")
    assert text.transformer is not None
    shape = replace(text.transformer, hidden=narrow, head_dim=narrow // heads, ffn=ffn // shrink)
    places = Vocabulary(size=config.count("max_position_embeddings", most=100_000_000))
    stored = 4 * rows * table + 6 * table * narrow + narrow + 2 * narrow
    layout = replace(text, name="layout", transformer=shape, vocabulary=places, stored=stored)
    return Model(name=name, modules=(text, layout), edges=())


def udop(config: Fields, name: str) -> Model:
    """T5 over the words and patches of a page."""
    width, heads = config.count("d_model"), config.count("num_heads")
    biases = config.get("relative_bias_args")
    biases = [{"type": "1d"}, {"type": "horizontal"}, {"type": "vertical"}] if biases is None else biases
    if not isinstance(biases, list) or not all(isinstance(one, dict) and set(one) == {"type"} for one in biases):
        raise config.error("relative_bias_args", f"expected a list of types, found {biases!r:.60}")
    # those along the page have 32 buckets whatever the key says
    more = heads * (config.count("relative_attention_num_buckets") + 32 * sum(one["type"] != "1d" for one in biases))
    encoder = t5_encoder(config, stored=more + 2 * config.count("max_2d_position_embeddings") * width)
    seen = fixed(config)
    page = patches(width, replace(seen, learned_positions=False))
    again = seen.channels * seen.patch**2 * width + width
    layers = config.optional("num_decoder_layers", most=2_000) or config.layers("num_layers")
    llm = t5_decoder(config, encoder.output_width, layers, stored=more + again)
    ends = (edge("vision", "encoder", "merge"), edge("encoder", "llm", "cross_attention"))
    config.log.notes.append("encoder and decoder are both priced with the words of a sample")
    return Model(name=name, modules=(page, encoder, llm), edges=ends)


def t5_encoder(fields: Fields, *, stored: int) -> ModelModule:
    """T5's encoder; its table is the decoder's."""
    heads = fields.count("num_heads")
    shape = Transformer(
        layers=fields.layers("num_layers"),
        hidden=fields.count("d_model"),
        heads=heads,
        kv_heads=heads,
        head_dim=fields.count("d_kv"),
        ffn=fields.count("d_ff"),
        gated_mlp=gated(fields),
        causal=False,
        norm="rms",
    )
    return ModelModule(
        name="encoder",
        kind="text_encoder",
        modality="text",
        transformer=shape,
        vocabulary=Vocabulary(size=fields.count("vocab_size"), elsewhere=True),
        text=TextInput(positions="none"),
        stored=stored,
        source=SOURCE,
    )


def t5_decoder(fields: Fields, read: int, layers: int, *, stored: int) -> ModelModule:
    return decoder(
        replace(fields, values={**fields.values, "num_decoder_layers": layers}),
        read,
        hidden="d_model",
        heads="num_heads",
        layers="num_decoder_layers",
        ffn="d_ff",
        head_dim=fields.count("d_kv"),
        stored=stored,
        tied=True,
        bias=False,
        norm="rms",
        gated_mlp=gated(fields),
    )


def gated(fields: Fields) -> bool:
    return str(fields.get("feed_forward_proj")).startswith("gated")
