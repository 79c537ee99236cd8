"""SAM, SAM-HQ, SAM 2 and SAM 3 (arXiv 2304.02643, 2408.00714): a tower, necks of each resolution, and small decoders
whose learned rows attend to the image.

What works on a few rows (prompts, heads, memory of single objects) is kept and not counted, as is the attention of
image rows to them.
"""

from dataclasses import replace

from mmplan.scenario.formats.hf import sam
from mmplan.scenario.formats.hf.resamplers import encoder_module, querying
from mmplan.scenario.formats.hf.vit import BIASES, vision_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import apart, divided, edge, stepping
from mmplan.scenario.scenario import Model, ModelModule, Transformer, VisionInput
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
    conv,
    numbers,
    residual,
)


def mlp(width: int, inner: int, out: int, depth: int) -> int:
    """Numbers of so many linears in a row."""
    return (width + 1) * inner + (depth - 2) * (inner + 1) * inner + (inner + 1) * out


def segmenting(config: Fields, name: str) -> Model:
    """SAM and SAM-HQ."""
    fields = config.part("vision_config")
    vision = sam.tower(fields)
    channels = fields.count("output_channels")
    neck = stepping(sam.neck_steps(channels), (vision.output_width, channels), name="vision_neck")
    places = 2 * fields.count("num_pos_feats") * (1 if config.get("tie_word_embeddings") is not False else 2)
    decoder, masks = mask_decoder(config, channels, places)
    return _decoded(name, (vision, neck), decoder, masks)


def _decoded(name: str, way: tuple[ModelModule, ...], *behind: ModelModule) -> Model:
    model = apart(name, way)
    edges = tuple(edge(way[-1].name, module.name, "input") for module in behind)
    return replace(model, modules=(*model.modules, *behind), edges=(*model.edges, *edges))


def prompts(config: Fields, width: int) -> int:
    """Points, boxes and masks as rows."""
    fields = config.part("prompt_encoder_config")
    fields.same("hidden_size", width, "the neck's width")
    channels = fields.count("mask_input_channels")
    quarter = channels // 4
    mask: Steps = (conv(quarter, 2), Normed(), conv(channels, 2), Normed(), Dense(width=width))
    return numbers(mask, 1) + (fields.count("num_point_embeddings", most=10_000) + 2) * width


def mask_decoder(config: Fields, width: int, kept: int) -> tuple[ModelModule, ModelModule]:
    """Learned rows that attend to the image, and the image at four times its side, of which they make masks."""
    fields = config.part("mask_decoder_config")
    fields.same("hidden_size", width, "the neck's width")
    heads, layers = fields.count("num_attention_heads"), fields.layers()
    ffn, count = fields.count("mlp_dim"), fields.count("num_multimask_outputs", most=10_000) + 1
    rate = fields.count("attention_downsample_rate", most=10_000)  # of the last attention; that of the others is fixed
    less, last = width // 2, width // rate
    quarter, eighth = width // 4, width // 8
    iou, depth = fields.count("iou_head_hidden_dim"), fields.count("iou_head_depth", least=2, most=100)
    back = 3 * (width + 1) * less + (less + 1) * width  # of the image to the rows
    deeper = (layers - 2) * ffn * (ffn + 1) if config.kind not in ("sam", "sam_hq") else 0  # linears within an MLP
    own = 4 * width * (width + 1)
    block: Steps = (
        *(residual(Attend(across=True)), Normed(), residual(Mlp()), Normed()),
        Kept(size=own + 2 * width + back + 2 * width + max(0, deeper)),
    )
    shape = replace(querying(width, heads, ffn, layers, width, max(1, less // heads)), final_norm=False)
    if less % heads:
        raise fields.error("num_attention_heads", f"{less} columns are not a multiple of {heads} heads")
    queries = count + 1
    stored = kept + prompts(config, width) + 3 * (width + 1) * last + (last + 1) * width + 2 * width
    stored += count * mlp(width, width, eighth, 3) + mlp(width, iou, count, depth)
    shrunk: Steps = (
        *(Convolve(width=quarter, taps=4, spreads=4, transposed=True), Normed(), Active()),
        *(Convolve(width=eighth, taps=4, spreads=4, transposed=True), Active()),
    )
    if config.kind == "sam_hq":
        queries += 1
        deep = fields.count("vit_dim")
        compress: Steps = (conv(width, 2), Normed(), conv(eighth, 2))
        fine: Steps = (conv(quarter, 2), Normed(), conv(eighth, 2))
        mask: Steps = (conv(quarter, 3), Normed(), conv(eighth, 3))
        stored += mlp(width, width, eighth, 3) + numbers(compress, deep) + numbers(fine, width) + numbers(mask, eighth)
    elif config.kind != "sam":  # a row that says whether there is an object, and finer resolutions
        queries += 1
        stored += mlp(width, width, 1, 3)
        stored += (width + 1) * (quarter + eighth)
    form = Form(blocks=((layers, block),), queries=queries)
    decoder = encoder_module(shape, form, name="mask_decoder", stored=stored)
    return decoder, stepping(shrunk, (width, eighth), name="mask_upscaling")


def sam2(config: Fields, name: str) -> Model:
    """SAM 2 for images."""
    stages, necks, width = hiera_seen(config.part("vision_config"))
    return of_stages(name, stages, necks, *mask_decoder(config, width, width))


def sam2_video(config: Fields, name: str) -> Model:
    stages, necks, width = hiera_seen(config.part("vision_config"))
    memory, more = remembering(config, width)
    return of_stages(name, stages, necks, *mask_decoder(config, width, width + more), memory)


def sam2_vision(config: Fields, name: str) -> Model:
    stages, necks, _ = hiera_seen(config)
    return of_stages(name, stages, necks)


def of_stages(
    name: str, stages: tuple[ModelModule, ...], necks: tuple[ModelModule, ...], *behind: ModelModule
) -> Model:
    """A neck behind each stage, the decoders behind the last but one of the resolutions."""
    model = apart(name, stages)
    edges = [edge(stage.name, neck.name, "input") for stage, neck in zip(stages, necks, strict=True)]
    edges += [edge(necks[min(2, len(necks) - 1)].name, module.name, "input") for module in behind]
    return replace(model, modules=(*stages, *necks, *behind), edges=(*model.edges, *edges))


def hiera_seen(fields: Fields) -> tuple[tuple[ModelModule, ...], tuple[ModelModule, ...], int]:
    """Hiera and a linear behind each of its resolutions."""
    stages, width = hiera(fields.part("backbone_config")), fields.count("fpn_hidden_size")
    side = fields.count("fpn_kernel_size", most=99)
    listed = fields.get("backbone_channel_list")
    expected = [stage.output_width for stage in reversed(stages)]
    if listed is not None and listed != expected:
        raise fields.error("backbone_channel_list", f"expected {expected}, found {listed!r:.60}")
    necks = tuple(
        stepping((conv(width, side),), (stage.output_width, width), name=f"vision_neck{index}")
        for index, stage in enumerate(stages)
    )
    return stages, necks, width


def hiera(fields: Fields) -> tuple[ModelModule, ...]:
    """Hiera (arXiv 2306.00989): the first block of each further stage widens rows and takes the largest of four; its
    attention's scores are not counted."""
    usual = {
        "blocks_per_stage": (1, 2, 7, 2),
        "embed_dim_per_stage": (96, 192, 384, 768),
        "num_attention_heads_per_stage": (1, 2, 4, 8),
        "window_size_per_stage": (8, 4, 14, 7),
    }
    depths, widths, heads, windows = (
        value if fields.get(key) is None else fields.stages(key, most=1_000_000 if "dim" in key else 2_000)
        for key, value in usual.items()
    )
    if not len(depths) == len(widths) == len(heads) == len(windows):
        raise fields.error("blocks_per_stage", f"expected as many as widths, heads and windows, found {len(depths)}")
    fields.refuse_unless("num_query_pool_stages", len(depths) - 1, why="stages without a smaller side")
    listed = fields.get("global_attention_blocks")
    whole = (5, 7, 9) if listed is None else fields.indices("global_attention_blocks", sum(depths))
    kernel = _side(fields, "patch_kernel_size", 7)
    stride = _side(fields, "patch_stride", 4)
    image = _side(fields, "image_size", 1024)
    grid = fields.get("window_positional_embedding_background_size")
    rows = [7, 7] if grid is None else list(fields.numbers("window_positional_embedding_background_size", count=2))
    channels = fields.count("num_channels", most=1_000)
    placed = (rows[0] * rows[1] + windows[0] ** 2) * widths[0]
    stages: list[ModelModule] = []
    first = 0
    for index, (depth, width, count, window) in enumerate(zip(depths, widths, heads, windows, strict=True)):
        ratio = fields.ratio("mlp_ratio")
        shape = Transformer(
            layers=depth,
            hidden=width,
            heads=count,
            kv_heads=count,
            head_dim=divided(fields, width, count),
            ffn=int(width * ratio),
            gated_mlp=False,
            causal=False,
            norm="layer",
            final_norm=False,
            window_tokens=window**2,
            global_layers=tuple(one - first for one in whole if first <= one < first + depth),
            **BIASES,
        )
        usual_block: Steps = (residual(Normed(), Attend()), residual(Normed(), Mlp()))
        front: Steps = (conv(width, kernel, stride=stride),)
        blocks: tuple[tuple[int, Steps], ...] = ((depth, usual_block),)
        if index:
            if width % 3:
                raise fields.error("embed_dim_per_stage", f"expected multiples of 3, found {width}")
            # the output's products stand for those on a third of the columns each
            mixed: Steps = (Dense(width=3 * width), Average(rows=4), Convolve(width=width, taps=1, groups=3))
            wider: Steps = (Dense(width=width), Average(rows=4))
            front = (Normed(), Fork(left=wider, right=mixed))
            blocks = ((1, (residual(Normed(), Mlp()),)), (depth - 1, usual_block))
            blocks = tuple(block for block in blocks if block[0])
            stages.append(encoder_module(shape, Form(front=front, blocks=blocks), name=f"vision_stage{index}"))
        else:
            seen = VisionInput(patch=stride, channels=channels, image_size=image // stride * stride)
            form = Form(front=front, raw_width=channels, blocks=blocks)
            stages.append(replace(vision_module(shape, seen, placed), form=form))
        first += depth
    return tuple(stages)


def _side(fields: Fields, key: str, usual: int) -> int:
    return usual if fields.get(key) is None else fields.side(key)


def remembering(config: Fields, width: int) -> tuple[ModelModule, int]:
    """Image rows attend to themselves and to rows of frames before (kept); and numbers of what makes such rows."""
    layers, ffn = (
        config.layers("memory_attention_num_layers"),
        config.count("memory_attention_feed_forward_hidden_size"),
    )
    config.same("memory_attention_hidden_size", width, "the neck's width")
    heads, rate = config.count("memory_attention_num_attention_heads"), config.count("memory_attention_downsample_rate")
    slim = config.count("memory_encoder_output_channels")
    inner = width // rate
    shape = replace(querying(width, heads, ffn, layers, width, divided(config, inner, heads)), cross_layers=())
    shape = replace(shape, cross_width=None)
    across = (width + 1) * inner + 2 * (64 + 1) * inner + (inner + 1) * width  # 64 whatever the memory's width is
    block: Steps = (
        residual(Normed(), Attend()),
        Kept(size=across + 2 * width),
        residual(Normed(), Mlp()),
    )
    memory = encoder_module(shape, Form(blocks=((layers, block),)), name="memory_attention", stored=2 * width)
    total, stride = config.count("mask_downsampler_total_stride"), config.count("mask_downsampler_stride")
    taps, side = config.count("mask_downsampler_kernel_size", most=99), 1
    steps: Steps = ()
    while side < total:
        side *= max(2, stride)
        steps += (conv(side**2, taps), Normed())
    masked = config.count("mask_downsampler_embed_dim")
    fused = config.count("memory_encoder_hidden_size")
    more = numbers((*steps, Dense(width=masked)), 1) + (fused + 1) * fused + (fused + 1) * slim
    wide, fine = config.count("memory_fuser_intermediate_dim"), config.count("memory_fuser_embed_dim")
    fuser: Steps = (
        Kept(size=fine),
        conv(fine, config.count("memory_fuser_kernel_size", most=99), groups=fine),
        *(Normed(), Dense(width=wide), Dense(width=fine)),
    )
    more += config.layers("memory_fuser_num_layers") * numbers(fuser, fine)
    more += 17 + 3 * (width + 1) * width  # masks at a quarter of their side, rows of objects
    more += config.count("num_maskmem", most=10_000) * slim + 2 * width
    more += slim if config.flag("enable_occlusion_spatial_embedding") else 0
    more += (width + 1) * slim if config.flag("enable_temporal_pos_encoding_for_object_pointers") else 0
    return memory, more
