"""Pairs of encoders of their own kinds: AIMv2, TIPSv2, GroupViT, X-CLIP, VideoPrism. What works on one row of an image
or text is kept and not counted."""

from dataclasses import replace

from mmplan.scenario.formats.hf.pairs import paired, text_tower
from mmplan.scenario.formats.hf.resamplers import encoder_module
from mmplan.scenario.formats.hf.towers import tower_of
from mmplan.scenario.formats.hf.vit import UNBIASED_GATED, fixed, vision_module, vit
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import apart, stepping
from mmplan.scenario.scenario import Modality, Model, ModelModule, VisionInput
from mmplan.scenario.steps import Active, Attend, Dense, Form, Kept, Mlp, Normed, Steps, Usual, residual


def aimv2(config: Fields, name: str) -> Model:
    """RMS norms and gated MLPs on both sides (arXiv 2411.14402)."""
    text = config.part("text_config")
    bias = text.flag("qkv_bias")
    shape = {**UNBIASED_GATED, "qkv_bias": bias, "out_bias": bias, "mlp_bias": text.flag("mlp_bias")}
    words = text_tower(text, causal=True, **shape)
    return paired(name, tower_of(config), words, config.count("projection_dim"), stored=1)


def tipsv2(config: Fields, name: str) -> Model:
    """DINOv2 with registers, and words without stored positions."""
    text = text_tower(config.part("text_config"), causal=False, table=False)
    return apart(name, (tower_of(config),), (replace(text, stored=1),))


def groupvit(config: Fields, name: str) -> Model:
    """Learned rows attend to patches, and further ones to those (arXiv 2202.11094). While patches, or the learned rows
    of the stage before, pass their blocks, the next ones beside them are not counted."""
    fields, text = config.part("vision_config"), text_tower(config.part("text_config"), causal=True)
    depths = fields.stages("depths")
    tokens, groups = (_whole(fields, key, len(depths)) for key in ("num_group_tokens", "num_output_groups"))
    ratios = fields.get("assign_mlp_ratio")
    good = isinstance(ratios, list) and len(ratios) == 2 and all(isinstance(one, int | float) for one in ratios)
    if not good or not all(0 < one < 1_000 for one in ratios):
        raise fields.error("assign_mlp_ratio", f"expected two numbers above 0, found {ratios!r:.60}")
    plain = vit(fields, final_norm=False)
    width, half = plain.hidden, plain.hidden // 2
    few, many = int(width * ratios[0]), int(width * ratios[1])
    ways = [vision_module(replace(plain, layers=depths[0]), fixed(fields), 4 * width)]
    for index in range(1, len(depths)):
        token, group, after = tokens[index - 1], groups[index - 1], tokens[index]
        last = index + 1 == len(depths)
        if not group <= token or bool(after) == last:
            raise fields.error("num_group_tokens", f"expected as many as num_output_groups, then 0, found {tokens}")
        kept = 8 * width + _mixer(token, few, group) + (token - group) * width
        kept += 2 * width + _mixer(group, half, after) if after else 0
        across: Steps = (
            *(residual(Attend(across=True)), Normed(), residual(Mlp()), Normed()),
            *(residual(Attend(across=True)), residual(Mlp(ffn=many)), Kept(size=kept)),
        )
        form = Form(blocks=((1, across), (depths[index], (Usual(),))), queries=group)
        shape = replace(plain, layers=depths[index] + 1, cross_layers=(0,), cross_width=width)
        ways.append(encoder_module(shape, form, name=f"vision_stage{index}"))
    inner, out = config.count("projection_intermediate_dim"), config.count("projection_dim")

    def end(size: int, side: str, modality: Modality, stored: int = 0) -> ModelModule:
        steps: Steps = (Dense(width=inner), Normed(), Active(), Dense(width=out))
        return replace(stepping(steps, (size, out), name=f"{side}_projector", stored=stored), modality=modality)

    return apart(name, (*ways, end(width, "vision", "vision")), (text, end(text.output_width, "text", "text", 1)))


def _mixer(rows: int, inner: int, out: int) -> int:
    """Two linears over learned rows."""
    return rows * inner + inner + inner * out + out


def _whole(fields: Fields, key: str, count: int) -> list[int]:
    value = fields.get(key)
    good = isinstance(value, list) and len(value) == count
    if not good or any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= 100_000 for one in value):
        raise fields.error(key, f"expected {count} whole numbers, found {value!r:.60}")
    return list(value)


def xclip(config: Fields, name: str) -> Model:
    """CLIP over frames; one row of each frame passes messages to the others, which is kept and not counted."""
    fields, text = config.part("vision_config"), text_tower(config.part("text_config"), causal=True)
    shape = vit(fields, norm_first_extra=True)
    width, out = shape.hidden, config.count("projection_dim")
    message = 5 * width * (width + 1) + 2 * width
    form = Form(blocks=((shape.layers, (Usual(), Kept(size=message))),))
    vision = replace(vision_module(shape, fixed(fields, bias=False, class_token=True)), form=form)
    size, ffn = fields.count("mit_hidden_size"), fields.count("mit_intermediate_size")
    fields.same("mit_hidden_size", out, "projection_dim =")
    frames = fields.layers("mit_num_hidden_layers") * (4 * size * (size + 1) + 2 * size * ffn + ffn + 5 * size)
    frames += fields.count("num_frames") * size
    layers = config.count("prompt_layers", most=2_000)
    prompts = 2 * width + width * out + 3 * out + layers * (4 * out**2 + out + 4 * out + 8 * out**2 + 5 * out)
    config.log.notes.append("blocks over one row of each frame (mit, prompts_generator, message) have no work here")
    return paired(name, vision, text, out, stored=1 + frames + prompts)


def videoprism(config: Fields, name: str) -> Model:
    """Blocks over the patches of a frame, then over frames, then over all; images are frames, and all blocks are priced
    over the patches of one frame."""
    fields, words = config.part("vision_config"), config.part("text_config")
    times = fields.numbers("tubelet_size", count=3)
    if times[1] != times[2]:
        raise fields.error("tubelet_size", f"expected square patches, found {times[1]} x {times[2]}")
    depth = sum(fields.layers(f"num_{kind}_layers") for kind in ("spatial", "temporal", "auxiliary"))
    eye = replace(fields, values={**fields.values, "num_hidden_layers": depth, "patch_size": times[1]})
    bias = fields.flag("qkv_bias")
    shape = vit(eye, qkv_bias=bias)
    seen: VisionInput = replace(fixed(eye), temporal_patch=times[0])
    width, heads = shape.hidden, shape.heads
    across = shape.ffn // heads * heads
    head = shape.ffn // heads + width + 3 * (width + bias) * across + (across + 1) * width + 2 * width
    kept = fields.count("num_frames") * width + 2 * width + head
    config.log.notes.append("blocks over frames and over all patches are priced over the patches of one frame")
    text = text_tower(words, causal=False, table=False, qkv_bias=words.flag("qkv_bias"))
    return apart(name, (vision_module(shape, seen, kept),), (replace(text, stored=text.output_width),))
