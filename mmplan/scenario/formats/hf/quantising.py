"""Families whose images are words: a convolutional encoder gives each stretch of an image the nearest code, and the
language model's own table the code's embedding (Chameleon, Emu3, Apertus 1.5). GLM-Image has a ViT in its place."""

from dataclasses import replace

from mmplan.scenario.formats.hf.codecs import wavtokenizer
from mmplan.scenario.formats.hf.resamplers import encoder_module
from mmplan.scenario.formats.hf.text import language_module, text_module
from mmplan.scenario.formats.hf.vit import native, vision_module, vit
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import SOURCE, chain, merged, stepping
from mmplan.scenario.scenario import Model, ModelModule, Transformer, VisionInput, Vocabulary
from mmplan.scenario.steps import Active, Attend, Dense, Fork, Form, Kept, Look, Normed, Steps, conv, residual

SIDE = 512  # pixels


def emu3(config: Fields, name: str) -> Model:
    """Images are priced alone: convolutions over time see one frame. The side that draws is left out."""
    fields, llm = config.part("vq_config"), text_module(config, "text_config")
    levels, width = encoder(fields), fields.count("embed_dim")
    latent = fields.count("latent_channels")
    both = latent * (2 if fields.flag("double_latent") else 1)
    halvings = fields.count("temporal_downsample_factor", most=1_024).bit_length() - 1
    convolution = both * both * 27 + both  # 3 x 3 x 3
    times = halvings * (both * both * 36 + both) + 2 * (2 * convolution + 4 * both)
    codes: Steps = (
        Normed(),
        Active(function="silu"),
        conv(both, 3),
        Kept(size=times + 2 * both * width),  # of three frames that the last convolution reads one is here
        Dense(width=width),
        Dense(width=fields.count("codebook_size"), bias=False),
        Look(size=0, width=llm.output_width),
    )
    config.log.notes.append("the side that draws images (vqmodel.decoder, post_quant_conv) is left out")
    return chain(name, *levels, stepping(codes, (levels[-1].output_width, llm.output_width), name="codes"), llm)


def chameleon(config: Fields, name: str) -> Model:
    fields, llm = config.part("vq_config"), text_module(config)
    levels = encoder(fields)
    latent = fields.count("latent_channels") * (2 if fields.flag("double_latent") else 1)
    width = fields.count("embed_dim")
    codes: Steps = (
        Normed(),
        Active(function="silu"),
        conv(latent, 3),
        Dense(width=width),
        Dense(width=fields.count("num_embeddings"), bias=False),  # distances to the codes
        Look(size=0, width=llm.output_width),
    )
    extra = Kept(size=width * fields.count("latent_channels") + fields.count("latent_channels"))
    config.log.notes.append("the linear behind the codes, which only draws, has weights and no work")
    last = stepping((*codes, extra), (levels[-1].output_width, llm.output_width), name="codes")
    return chain(name, *levels, last, llm)


def glm_image(config: Fields, name: str) -> Model:
    """A ViT gives each patch the nearest code of a table that is not trained; the head names codes of images alone."""
    fields, book = config.part("vision_config"), config.part("vq_config")
    bias = fields.flag("attention_bias")
    shape = vit(fields, heads="num_heads", layers="depth", qkv_bias=bias, out_bias=bias, final_norm=False)
    rows = (fields.side("image_size") // fields.side("patch_size")) ** 2
    seen = native(fields, bias=True, rows=rows, temporal=False)
    text = config.part("text_config")
    llm = language_module(text.read_as_stack("glm_image_text"), tied=False)
    assert llm.vocabulary is not None
    size = text.count("vision_vocab_size")
    llm = replace(llm, vocabulary=Vocabulary(size=size), stored=(llm.vocabulary.size - size) * llm.output_width)
    width, codes, latent = book.count("embed_dim"), book.count("num_embeddings"), book.count("latent_channels")
    book.same("latent_channels", shape.hidden, "the tower's width")
    steps: Steps = (
        *(Dense(width=width), Dense(width=codes, bias=False), Look(size=0, width=llm.output_width)),
        Kept(size=(width + 1) * latent),
    )
    config.log.notes.append("the diffusion that draws images of the codes is no part of this file")
    return chain(name, vision_module(shape, seen), stepping(steps, (latent, llm.output_width), name="codes"), llm)


def apertus(config: Fields, name: str) -> Model:
    """Codes of images as Emu3.5's, codes of sound as WavTokenizer's; the head may have fewer rows than the table."""
    fields, text = config.part("vision_config"), config.part("text_config")
    llm = text_module(config, "text_config")
    rows = text.optional("output_vocab_size")
    assert llm.vocabulary is not None
    if rows is not None and rows != llm.vocabulary.size:
        further = llm.vocabulary.size - rows
        if further < 0 or llm.vocabulary.tied:
            message = f"expected at most vocab_size = {llm.vocabulary.size:,} and a head of its own, found {rows:,}"
            raise text.error("output_vocab_size", message)
        llm = replace(llm, vocabulary=Vocabulary(size=rows), stored=llm.stored + further * llm.output_width)
    levels, width = encoder(fields), llm.output_width
    codes: Steps = (
        *(Normed(), Active(function="silu"), conv(fields.count("latent_channels"), 3)),
        *(Dense(width=fields.count("embed_dim")), Dense(width=fields.count("codebook_size"), bias=False)),
        Look(size=0, width=width),
    )
    seen = stepping(codes, (levels[-1].output_width, width), name="vision_codes")
    ear = wavtokenizer(config.part("audio_config"))
    heard = replace(
        stepping((Kept(size=0), Look(size=0, width=width)), (ear.output_width, width), name="audio_codes"),
        modality="audio",
    )
    return merged(name, llm, (*levels, seen), (ear, heard))


def encoder(fields: Fields) -> tuple[ModelModule, ...]:
    """Levels of residual blocks, each with half the side of the one before; attention at the last."""
    base, count = fields.count("base_channels"), fields.count("num_res_blocks", most=100)
    factors = fields.numbers("channel_multiplier", most=1_000)
    at: tuple[int, ...] = ()
    if fields.kind == "emu3_vqgan":
        at = (3,) if fields.get("attn_resolutions") is None else fields.numbers("attn_resolutions")
    elif fields.kind == "apertus1p5_vision_tokenizer":
        whole, sides = fields.count("resolution", most=100_000), fields.numbers("attn_resolutions")
        at = tuple(index for index in range(len(factors)) if whole // 2**index in sides)
    else:
        fields.refuse_unless("attn_resolutions", None, [], why="attention at several resolutions")
    vanilla = fields.kind != "chameleon_vqgan" or fields.get("attn_type") == "vanilla"
    attending: Steps = (residual(Normed(), Attend()),)
    side = None if fields.kind == "apertus1p5_vision_tokenizer" else fields.optional("resolution", most=100_000)
    side, channels = side or SIDE, fields.count("in_channels", most=1_000)
    levels: list[ModelModule] = []
    before = base
    for index, factor in enumerate(factors):
        width, last = base * factor, index + 1 == len(factors)
        down: Steps = (conv(before, 3, stride=2),) if index else (conv(base, 3),)
        behind: Steps = attending if index in at else ()
        blocks: list[tuple[int, Steps]] = [(1, behind)] if behind else []
        blocks += [(1, (*residual_block(width, width), *behind))] * (count - 1)
        if last:
            middle: Steps = attending if vanilla else ()
            blocks += [(1, (*residual_block(width, width), *middle)), (1, residual_block(width, width))]
        blocks = blocks or [(1, (Kept(size=0),))]
        form = Form(
            front=(*down, *residual_block(before, width)), raw_width=None if index else channels, blocks=tuple(blocks)
        )
        shape = Transformer(
            layers=len(blocks),
            hidden=width,
            heads=1,
            kv_heads=1,
            head_dim=width,
            ffn=1,
            gated_mlp=False,
            causal=False,
            norm="layer",
            qkv_bias=True,
            out_bias=True,
            final_norm=False,
        )
        if index:
            levels.append(encoder_module(shape, form, name=f"vision_level{index}"))
        else:
            seen = VisionInput(patch=1, channels=channels, image_size=side)
            levels.append(
                ModelModule(
                    name="vision",
                    kind="vision_encoder",
                    modality="vision",
                    transformer=shape,
                    vision=seen,
                    form=form,
                    source=SOURCE,
                )
            )
        before = width
    return tuple(levels)


def residual_block(inputs: int, width: int) -> Steps:
    """Two convolutions behind norms, added to the input or to a linear of it."""
    silu = Active(function="silu")
    inner: Steps = (Normed(), silu, conv(width, 3), Normed(), silu, conv(width, 3))
    return (Fork(left=(Dense(width=width),) if inputs != width else (), right=inner),)
