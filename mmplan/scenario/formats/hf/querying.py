"""Families whose language model reads learned queries in place of a tower's tokens."""

from dataclasses import replace
from itertools import pairwise

from mmplan.scenario.formats.hf.conformers import granite, phi4
from mmplan.scenario.formats.hf.resamplers import encoder_module, perceiver, qformer, querying
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import tower_of
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import chain, edge, merged, projector_module, stepping
from mmplan.scenario.scenario import Model, ModelModule
from mmplan.scenario.steps import Attend, Dense, Fork, Form, Kept, Mlp, Normed, Steps, Usual, residual


def blip2(config: Fields, name: str) -> Model:
    """BLIP-2 and InstructBLIP: `num_query_tokens` queries for each image or frame, one linear."""
    instructed = config.kind != "blip-2"
    own = config.part("text_config").flag("tie_word_embeddings")  # the language model is one with a head of its own
    vision, llm = tower_of(config), text_module(config, "text_config", tied=own)
    queries = qformer(
        config.part("qformer_config"),
        queries=config.count("num_query_tokens"),
        context=vision.output_width,
        text=instructed or config.part("qformer_config").flag("use_qformer_text_input"),
    )
    if instructed:
        config.log.notes.append("the query transformer's work on the instruction is not counted, its weights are")
    return chain(name, vision, queries, projector_module((queries.output_width, llm.output_width)), llm)


def granite_speech(config: Fields, name: str) -> Model:
    """A conformer, queries for each window of its tokens, one linear. The adapter of the language model is left out."""
    audio, llm = granite(config.part("encoder_config")), text_module(config, "text_config")
    window, rate = config.count("window_size"), config.count("downsample_rate")
    if window % rate:
        raise config.error("downsample_rate", f"a window of {window} tokens is not a multiple of {rate}")
    queries = qformer(
        config.part("projector_config"),
        queries=window // rate,
        context=audio.output_width,
        window=window,
        modality="audio",
    )
    if config.flag("has_lora_adapter"):
        config.log.notes.append("has_lora_adapter: the adapter of the language model is a file of its own")
    return chain(
        name, audio, queries, projector_module((queries.output_width, llm.output_width), modality="audio"), llm
    )


def idefics2(config: Fields, name: str) -> Model:
    """A gated MLP to the language model's width, then latents that attend to tokens and themselves."""
    vision, llm = tower_of(config), text_module(config, "text_config")
    fields, width = config.part("perceiver_config"), llm.output_width
    inner = config.part("text_config").count("intermediate_size")
    heads, kv_heads = fields.count("resampler_n_heads"), fields.count("num_key_value_heads")
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{heads} heads are not a multiple of {kv_heads}")
    shape = replace(
        querying(width, heads, 4 * width, fields.layers("resampler_depth"), width, fields.count("resampler_head_dim")),
        kv_heads=kv_heads,
        norm="rms",
        gated_mlp=True,
        final_norm=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    )
    latents = perceiver(shape, queries=fields.count("resampler_n_latents"), norms=width)
    return chain(
        name, vision, projector_module((vision.output_width, inner, width), gated=True, bias=False), latents, llm
    )


def phi4_multimodal(config: Fields, name: str) -> Model:
    """Two encoders with two linears each; the projector of clips beside images has the same sizes and is stored."""
    vision, audio = tower_of(config), phi4(config.part("audio_config"))
    assert vision.vision is not None and vision.vision.image_size is not None
    llm, stack = text_module(config), config.part("vision_config")
    width = llm.output_width
    crop = stack.count("crop_size", most=100_000)
    if crop != vision.vision.image_size:
        config.log.notes.append(f"crop_size = {crop}: tiles are priced as images of {vision.vision.image_size} pixels")
    seen = projector_module(
        (vision.output_width, width, width), name="vision_projector", pool=4, stored=2 * vision.output_width
    )
    rate = config.part("audio_config").count("downsample_rate", most=100)
    dims = (audio.output_width * rate, width, width)
    again = dims[0] * width + width * width + 2 * width
    heard = projector_module(dims, name="audio_projector", modality="audio", merge=rate, stored=again)
    return merged(name, llm, (vision, seen), (audio, heard))


def kosmos(config: Fields, name: str) -> Model:
    """Kosmos-2 and 2.5: a linear, then latents that attend once to tokens and themselves."""
    own = config.part("text_config")
    own.refuse_unless("add_cross_attention", False, None, why="it attends to another model")
    vision, llm = tower_of(config), text_module(config, "text_config", tied=own.flag("tie_word_embeddings"))
    if config.kind == "kosmos-2" and vision.vision is not None:
        vision = replace(vision, vision=replace(vision.vision, keep_class_token=True))
    text = config.part("text_config")
    width, heads = llm.output_width, text.count("attention_heads")
    shape = querying(width, heads, 1, 1, width)
    form = Form(blocks=((1, (Attend(across=True),)),), queries=config.count("latent_query_num"), together=True)
    latents = encoder_module(shape, form, name="resampler")
    return chain(name, vision, projector_module((vision.output_width, width)), latents, llm)


def aria(config: Fields, name: str) -> Model:
    """One attention from learned queries, behind a second projection of queries and keys each; an MLP."""
    vision, llm = tower_of(config), text_module(config, "text_config")
    width, table = vision.output_width, config.get("projector_patch_to_query_dict")
    table = {"1225": 128, "4900": 256} if table is None else table  # of the class
    assert vision.vision is not None and vision.vision.image_size is not None
    patches = (vision.vision.image_size // vision.vision.patch) ** 2
    counts = [value for value in table.values() if isinstance(value, int)] if isinstance(table, dict) else []
    rows = config.optional("max_value_projector_patch_to_query_dict") or max(counts, default=0)
    if rows < 1:
        raise config.error("projector_patch_to_query_dict", "expected the number of queries of each number of patches")
    queries = table.get(str(patches), rows) if isinstance(table, dict) else rows
    keys: Steps = (Normed(), Fork(left=(Dense(width=width, bias=False),), right=(Dense(width=width, bias=False),)))
    heads = config.part("vision_config").count("num_attention_heads")
    shape = querying(width, heads, 1, 1, width)
    block: Steps = (Dense(width=width, bias=False), Attend(across=True), Dense(width=width), Normed())
    form = Form(front=(Normed(),), blocks=((1, block),), queries=int(queries))
    latents = encoder_module(shape, form, name="resampler", stored=(rows - int(queries)) * width)
    inner = config.part("text_config").count("hidden_size")
    last = projector_module((width, inner, llm.output_width), bias=False)
    return chain(name, vision, stepping(keys, (width, width), name="projector_keys"), latents, last, llm)


def idefics(config: Fields, name: str) -> Model:
    """Gated blocks that attend to the image stand in front of each `cross_layer_interval`-th block."""
    fields = config.part("vision_config")
    vision, llm = tower_of(config), text_module(config)
    width, read = llm.output_width, vision.output_width
    way: tuple[ModelModule, ...] = (vision,)
    config.refuse_unless("qk_layer_norms", False, None, why="norms on queries and keys of the blocks between")
    assert llm.transformer is not None
    if config.flag("use_resampler"):
        inner = config.part("perceiver_config")
        inner.refuse_unless("qk_layer_norms_perceiver", False, None, why="norms on queries and keys of the resampler")
        heads, depth = inner.count("resampler_n_heads"), inner.layers("resampler_depth")
        shape = querying(read, heads, 4 * read, depth, read, inner.count("resampler_head_dim"))
        shape = replace(shape, qkv_bias=False, out_bias=False, mlp_bias=False, final_norm=True)
        latents = perceiver(shape, queries=inner.count("resampler_n_latents"), norms=2 * read)
        way = (vision, latents)
    interval, layers = config.count("cross_layer_interval", most=2_000), llm.transformer.layers
    across: Steps = (
        residual(Normed(kind="rms"), Attend(across=True)),
        residual(Normed(kind="rms"), Mlp()),
        Kept(size=2),
        Usual(),
    )
    cross = tuple(range(0, layers, interval))
    blocks = tuple((1, across if index in cross else (Usual(),)) for index in range(layers))
    shape = replace(llm.transformer, cross_layers=cross, cross_width=read)
    more = config.optional("additional_vocab_size", least=0) or 0
    llm = replace(llm, transformer=shape, form=Form(blocks=blocks), stored=2 * more * width)
    inner_edges = [edge(a.name, b.name, "input") for a, b in pairwise(way)]
    edges = (*inner_edges, edge(way[-1].name, "llm", "cross_attention"))
    if fields.optional("embed_dim") is None:
        raise fields.missing("embed_dim")
    return Model(name=name, modules=(*way, llm), edges=edges)
