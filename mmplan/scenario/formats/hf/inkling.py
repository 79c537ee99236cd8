"""Inkling and Inkling 2: what stands before their language models. Inkling makes one token of each 40 x 40 pixels of
two frames by linears over ever larger squares, and one of each frame of sound by a table; Inkling 2 has a ViT."""

from dataclasses import replace
from itertools import pairwise
from math import ceil, log, prod

from mmplan.scenario.formats.hf.ears import audio_module
from mmplan.scenario.formats.hf.text import language_module, text_module
from mmplan.scenario.formats.hf.vit import bare, native, vision_module, vit
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import chain, merged, projector_module
from mmplan.scenario.scenario import AudioInput, Model, ModelModule, VisionInput, Vocabulary
from mmplan.scenario.steps import Active, Average, Dense, Join, Look, Normed, Steps

FRAMES_PER_S = 20  # `audio_token_duration_s` of feature_extraction_inkling.py: 0.05
RMS = Normed(kind="rms")


def first(config: Fields, name: str) -> Model:
    llm = text_module(config, "text_config", tied=False)
    eye, ear = config.part("vision_config"), config.part("audio_config")
    return merged(name, llm, (squares(eye, llm.output_width),), (bins(ear, llm.output_width),))


def squares(eye: Fields, width: int) -> ModelModule:
    """Linears with a norm and GELU, the last one to the language model's width."""
    patch, frames = eye.side("patch_size"), eye.side("temporal_patch_size")
    channels, layers = eye.count("num_channels", most=1_000), eye.layers()
    scales = _scales(eye, frames, patch, layers, channels)
    steps: Steps = ()
    for index, (start, end) in enumerate(pairwise(scales)):
        rows = prod(end[:3]) // prod(start[:3])
        steps += (Join(rows=rows),) if rows > 1 else ()
        last = index == layers - 1
        steps += (Dense(width=width, bias=False),) if last else (Dense(width=end[3], bias=False), RMS, Active())
    shape, form = bare(width, (*steps, RMS), channels)
    seen = VisionInput(patch=patch, temporal_patch=frames, channels=channels)
    return replace(vision_module(shape, seen), form=form)


def _scales(eye: Fields, frames: int, patch: int, layers: int, channels: int) -> list[tuple[int, int, int, int]]:
    """Frames, height, width and channels before and behind each layer: whichever planned scale is nearest to equal
    steps of the logarithm (`plan_out_scales` of modeling_inkling.py)."""
    sides = [prod(_primes(patch)[: count + 1]) for count in range(len(_primes(patch)))]
    times = [prod(_primes(frames)[: count + 1]) for count in range(len(_primes(frames)))]
    if not sides or not times:
        raise eye.error("patch_size", f"the class takes patches of several pixels and frames, found {patch}, {frames}")
    scales = [(1, 1, 1, channels)]
    scales += [(1, side, side, ceil(side**2 * channels / 64) * 64) for side in sides]
    scales += [(time, patch, patch, patch**2 * channels * time * 64) for time in times]
    if layers < len(scales):
        raise eye.error("num_hidden_layers", f"{layers} layers are fewer than the {len(scales)} scales of a patch")
    end = log(patch * patch * frames * channels)
    reduced = [log(prod(scale[:3])) for scale in scales]
    nearest = [
        min(range(len(scales)), key=lambda index, at=end * step / layers: abs(at - reduced[index]))  # type: ignore[misc]
        for step in range(layers + 1)
    ]
    nearest[0], nearest[-1] = 0, len(scales) - 1
    return [scales[index] for index in nearest]


def _primes(number: int) -> list[int]:
    """Prime factors, the largest first."""
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found[::-1]


def bins(ear: Fields, width: int) -> ModelModule:
    """Each bin of a frame's spectrum is a word of a table; a frame is their sum."""
    count, words = ear.count("n_mel_bins", most=100_000), ear.count("mel_vocab_size")
    shape, form = bare(width, (Look(size=count * words, width=width), Average(rows=count), RMS), 1)
    entry = AudioInput(mel_bins=count, frames_per_s=FRAMES_PER_S, pad_s=None, stride=1)
    return replace(audio_module(shape, entry), form=form)


def second_alone(text: Fields, name: str) -> Model:
    """The head has fewer rows than the token table, which is filled up."""
    llm, rows = language_module(text, tied=False), text.count("unpadded_vocab_size")
    assert llm.vocabulary is not None
    padded = llm.vocabulary.size - rows
    if padded < 0:
        raise text.error(
            "unpadded_vocab_size", f"expected at most vocab_size = {llm.vocabulary.size:,}, found {rows:,}"
        )
    llm = replace(llm, vocabulary=Vocabulary(size=rows), stored=llm.stored + padded * llm.output_width)
    return Model(name=name, modules=(llm,), edges=())


def second(config: Fields, name: str) -> Model:
    """A ViT and two linears over squares of its tokens."""
    llm = second_alone(config.part("text_config"), name).module("llm")
    tower = config.part("vision_config", kind="inkling2_vision")
    merge, inner = tower.count("spatial_merge_size", most=100) ** 2, tower.count("projection_hidden_dim")
    eye = vision(tower)
    dims = (merge * eye.output_width, inner, tower.count("text_hidden_size"))
    return chain(name, eye, projector_module(dims, merge=merge, bias=tower.flag("projector_bias")), llm)


def vision(tower: Fields) -> ModelModule:
    """A class token with a position of its own, a table stretched over images of any size, scaled branches."""
    width = tower.count("hidden_size")
    ffn = tower.optional("intermediate_size") or int(width * tower.ratio("mlp_ratio"))
    shape = vit(tower, ffn=ffn, norm_first_extra=True, final_norm=False, layer_scale=True)
    rows = tower.count("posemb_grid_size", most=10_000) ** 2
    seen = replace(native(tower, bias=False, rows=rows, channels="num_channels", temporal=False), class_token=True)
    return vision_module(shape, seen, width)
