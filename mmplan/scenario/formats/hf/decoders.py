"""Families in which a text decoder attends to an encoder: TrOCR, Donut, Pix2Struct, BLIP, Florence-2, T5Gemma 2."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mmplan.scenario.formats.hf.pairs import bert_tower, pooler
from mmplan.scenario.formats.hf.swin import swin
from mmplan.scenario.formats.hf.text import language_module
from mmplan.scenario.formats.hf.towers import tower_of
from mmplan.scenario.formats.hf.vit import POST
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import SOURCE, chain, divided, edge, projector_module
from mmplan.scenario.scenario import Model, ModelModule, TextInput, Transformer, Vocabulary

Decoder = Callable[[Fields, int], ModelModule]


def decoder(
    text: Fields,
    read: int,
    *,
    hidden: str = "hidden_size",
    heads: str = "num_attention_heads",
    layers: str = "num_hidden_layers",
    ffn: str = "intermediate_size",
    stored: int = 0,
    tied: bool,
    bias: bool = True,
    **shape: Any,
) -> ModelModule:
    """Blocks that attend to their own tokens and then to rows of width `read`."""
    width, count, depth = text.count(hidden), text.count(heads), text.layers(layers)
    usual: dict[str, Any] = {
        "kv_heads": count,
        "head_dim": shape.pop("head_dim", None) or divided(text, width, count),
        "gated_mlp": False,
        "norm": "layer",
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
    }
    blocks = Transformer(
        layers=depth,
        hidden=width,
        heads=count,
        ffn=text.count(ffn),
        causal=True,
        cross_layers=tuple(range(depth)),
        cross_width=read,
        cross_also=True,
        **{**usual, **shape},
    )
    return ModelModule(
        name="llm",
        kind="language_model",
        modality="text",
        transformer=blocks,
        vocabulary=Vocabulary(size=text.count("vocab_size"), tied=tied),
        text=TextInput(positions="none"),
        stored=stored,
        source=SOURCE,
    )


def bert(text: Fields, read: int) -> ModelModule:
    """BERT, RoBERTa, BLIP's text model: norms behind the branches; embeddings of positions and kinds, and the head's
    transform, whose products are not counted."""
    width = text.count("hidden_size")
    rows = text.count("max_position_embeddings", most=100_000_000) + (text.optional("type_vocab_size", least=0) or 0)
    tied = text.get("tie_word_embeddings") is not False
    head = width * width + 3 * width + text.count("vocab_size") * (1 if tied else 2)  # two biases of an untied head
    return decoder(text, read, stored=(rows + 2) * width + head, tied=tied, **POST)


def gpt2(text: Fields, read: int) -> ModelModule:
    """GPT-2 with attention to the encoder between its own and the MLP."""
    text.log.read.add(text.key("add_cross_attention"))
    text = replace(text, values={**text.values, "add_cross_attention": False})
    plain = language_module(text, tied=text.get("tie_word_embeddings") is not False)
    assert plain.transformer is not None
    shape = replace(
        plain.transformer,
        cross_layers=tuple(range(plain.transformer.layers)),
        cross_width=read,
        cross_also=True,
    )
    return replace(plain, transformer=shape)


def bart(text: Fields, read: int, *, prefix: str = "decoder_") -> ModelModule:
    """BART's and mBART's decoders; mBART has norms in front of the branches and one at the end."""
    width = text.count("d_model")
    before = text.kind == "mbart"
    rows = text.count("max_position_embeddings", most=100_000_000) + 2
    return decoder(
        text,
        read,
        hidden="d_model",
        heads=f"{prefix}attention_heads",
        layers=f"{prefix}layers",
        ffn=f"{prefix}ffn_dim",
        stored=(rows + 2) * width,
        tied=text.get("tie_word_embeddings") is not False,
        **({} if before else POST),
    )


def trocr(text: Fields, read: int) -> ModelModule:
    width = text.count("d_model")
    learned = text.get("use_learned_position_embeddings") is not False
    rows = text.count("max_position_embeddings", most=100_000_000) + 2 if learned else 0
    norm = 2 if text.get("layernorm_embedding") is not False else 0
    return decoder(
        text,
        read,
        hidden="d_model",
        heads="decoder_attention_heads",
        layers="decoder_layers",
        ffn="decoder_ffn_dim",
        stored=(rows + norm) * width,
        tied=text.get("tie_word_embeddings") is not False,
        **POST,
    )


DECODERS: Mapping[str, Decoder] = {
    "bart": bart,
    "bert": bert,
    "gpt2": gpt2,
    "mbart": bart,
    "roberta": bert,
    "trocr": trocr,
    "xlm-roberta": bert,
}


def encoder_decoder(config: Fields, name: str) -> Model:
    """Any tower and any decoder that are known alone; a linear between them where their widths differ."""
    eye, text = config.part("encoder"), config.part("decoder")
    seen = swin(eye) if eye.kind in ("donut-swin", "swin") else (tower_of(config, "encoder"),)
    vision = seen[-1]
    build = DECODERS.get(text.kind)
    if build is None:
        known = ", ".join(f"'{kind}'" for kind in sorted(DECODERS))
        raise text.error("model_type", f"the decoder '{text.kind:.60}' is not read; known: {known}")
    wanted = text.optional("hidden_size", "d_model", "n_embd")
    read = text.optional("cross_attention_hidden_size")
    if vision.output_width != wanted and read is None and wanted is not None:
        bridge = projector_module((vision.output_width, wanted))
        return chain(name, *seen, bridge, build(text, wanted), last="cross_attention")
    return chain(name, *seen, build(text, vision.output_width), last="cross_attention")


def words_to_words(config: Fields, name: str) -> Model:
    """BERT or RoBERTa as encoder and any decoder that is known alone, both priced with the words of a sample."""
    heard, said = config.part("encoder"), config.part("decoder")
    if heard.kind not in ("bert", "roberta", "xlm-roberta"):
        raise heard.error("model_type", f"expected 'bert', 'roberta' or 'xlm-roberta', found '{heard.kind:.60}'")
    build = DECODERS.get(said.kind)
    if build is None:
        known = ", ".join(f"'{kind}'" for kind in sorted(DECODERS))
        raise said.error("model_type", f"the decoder '{said.kind:.60}' is not read; known: {known}")
    words = bert_tower(heard, stored=pooler(heard.count("hidden_size")))
    llm, read = build(said, words.output_width), words.output_width
    config.log.notes.append("encoder and decoder are both priced with the words of a sample")
    wanted = said.optional("hidden_size", "d_model", "n_embd") or read
    if wanted == read or said.optional("cross_attention_hidden_size") is not None:
        return Model(name=name, modules=(words, llm), edges=(edge("text", "llm", "cross_attention"),))
    bridge = projector_module((read, wanted), modality="text")
    return chain(name, words, bridge, build(said, wanted), last="cross_attention")


def pix2struct(config: Fields, name: str) -> Model:
    """T5's decoder over unfolded patches; buckets of relative positions are stored in its first block."""
    vision, text = tower_of(config), config.part("text_config")
    buckets = text.count("relative_attention_num_buckets") * text.count("num_heads")
    if text.count("hidden_size") != vision.output_width:
        message = f"expected the tower's width {vision.output_width}, found {text.count('hidden_size')}"
        raise text.error("hidden_size", message)
    llm = decoder(
        text,
        vision.output_width,
        heads="num_heads",
        layers="num_layers",
        ffn="d_ff",
        stored=buckets,
        tied=config.flag("tie_word_embeddings"),
        bias=False,
        norm="rms",
        gated_mlp=True,
        activation="gelu",
    )
    return Model(name=name, modules=(vision, llm), edges=(edge("vision", "llm", "cross_attention"),))


def blip(config: Fields, name: str) -> Model:
    """BLIP for captions: BERT's decoder attends to the image."""
    vision, text = tower_of(config), config.part("text_config")
    llm = bert(text, vision.output_width)
    return Model(name=name, modules=(vision, llm), edges=(edge("vision", "llm", "cross_attention"),))


def git(config: Fields, name: str) -> Model:
    """GIT: image tokens stand in front of the words of a small causal BERT."""
    vision = tower_of(config)
    if vision.vision is not None:
        vision = replace(vision, vision=replace(vision.vision, keep_class_token=True))
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    shape = Transformer(
        layers=config.layers(),
        hidden=width,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(config, width, heads),
        ffn=config.count("intermediate_size"),
        gated_mlp=False,
        causal=True,
        norm="layer",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        **POST,
    )
    size = config.count("vocab_size")
    frames = config.optional("num_image_with_embedding", least=0) or 0
    rows = config.count("max_position_embeddings", most=100_000_000)
    llm = ModelModule(
        name="llm",
        kind="language_model",
        modality="text",
        transformer=shape,
        vocabulary=Vocabulary(size=size, tied=config.flag("tie_word_embeddings")),
        text=TextInput(positions="none"),
        stored=(rows + 2) * width + size,
        source=SOURCE,
    )
    stored = 2 * width + frames * vision.output_width
    return chain(name, vision, projector_module((vision.output_width, width), stored=stored), llm)
