"""The load of every module for given samples: exact sums, no averages of squares.

Lengths follow the model: images become patches (and a class token), audio clips mel frames and half as many tokens,
a language model's sequence is the tokens merged into it plus its own text, a talker's also its producer's tokens.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from mmplan.cost_models.delta_ops import CHUNK
from mmplan.cost_models.load import Load
from mmplan.cost_models.module_order import upstream_first
from mmplan.scenario.samples import reference_samples
from mmplan.scenario.scenario import AudioInput, Data, Model, ModelModule, Sample, Scenario, Transformer, VisionInput
from mmplan.scenario.steps import row_ratio


def sample_loads(scenario: Scenario, samples: Sequence[Sample]) -> dict[str, Load]:
    """Module name -> load of all `samples` together."""
    return summed_loads(scenario.model, samples)


def summed_loads(model: Model, samples: Sequence[Sample]) -> dict[str, Load]:
    """The same of a model."""
    total = {module.name: Load() for module in model.modules}
    for loads in each_load(model, samples):
        for name, load in loads.items():
            total[name] += load
    return total


def each_load(model: Model, samples: Sequence[Sample]) -> list[dict[str, Load]]:
    """The loads of each sample; equal ones, of which data often has many, are measured once."""
    known = {sample: _one_sample(model, sample) for sample in dict.fromkeys(samples)}
    return [known[sample] for sample in samples]


def mean_loads(scenario: Scenario, microbatch_size: int) -> dict[str, Load]:
    """Module name -> mean load of a microbatch of `microbatch_size` samples of the scenario's data."""
    return {name: load.scaled(microbatch_size) for name, load in _mean_sample(scenario.model, scenario.data).items()}


@lru_cache(maxsize=16)
def _mean_sample(model: Model, data: Data) -> dict[str, Load]:
    samples = reference_samples(data)
    total = summed_loads(model, samples)
    return {name: load.scaled(1 / len(samples)) for name, load in total.items()}


def sequence_lengths(model: Model, sample: Sample) -> dict[str, tuple[int, ...]]:
    """Module name -> tokens of each of its sequences in this sample, in the order they are packed."""
    lengths: dict[str, tuple[int, ...]] = {}
    for module in upstream_first(model):
        lengths[module.name] = _lengths(model, module, sample, lengths)
    return lengths


def output_lengths(module: ModelModule, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that each sequence of a module hands on: after pooling, without dropped class tokens."""
    if module.audio is not None:
        return tuple(length // module.audio.pool for length in lengths)
    if module.vision is not None and module.vision.class_token and not module.vision.keep_class_token:
        dropped = module.vision.tiles if module.vision.joint_tiles else 1
        return tuple(length - dropped for length in lengths)
    return lengths


def own_tokens(module: ModelModule, sample: Sample) -> int:
    """Token ids that a language model reads itself: speech tokens for a talker, else text."""
    if module.text is not None and module.text.tokens is not None:
        return module.text.tokens
    return sample.speech_tokens if module.modality == "speech" else sample.text_tokens


def context_lengths(model: Model, module: ModelModule, sample: Sample) -> tuple[int, ...]:
    """Tokens of other modules that cross layers or a `hidden` edge read in this sample (one number), or that a
    projector reads (one number per sequence)."""
    lengths = sequence_lengths(model, sample)
    if module.kind not in ("projector", "encoder"):
        return (_incoming(model, module, ("cross_attention", "hidden"), lengths),)
    return _read_lengths(model, module, lengths)


def image_tokens(vision: VisionInput, size: tuple[int, int], merge: int) -> int:
    """Patches of an image: of `image_size` when fixed, else of its own (height, width).

    At native resolution each side is rounded to a multiple of patch * sqrt(merge), at least one, so that a projector
    can merge whole squares (as Qwen2-VL's `smart_resize`).
    """
    if vision.image_size is not None:
        return (vision.image_size // vision.patch) ** 2
    group = math.isqrt(merge)
    unit = vision.patch * group
    height, width = (max(1, round(side / unit)) * group for side in size)
    return height * width


def audio_frames(audio: AudioInput, clip_s: float) -> int:
    """Mel frames of a clip after padding: at least two and even, so that the second convolution halves them exactly, or
    whole chunks."""
    seconds = audio.pad_s if audio.pad_s is not None else clip_s
    unit = audio.chunk_frames if audio.channels else audio.stride
    return unit * max(1, math.ceil(round(audio.frames_per_s * seconds) / unit))


def audio_clip_frames(module: ModelModule, sample: Sample) -> tuple[int, ...]:
    """Mel frames of each clip of a sample; empty for modules without audio."""
    return tuple(audio_frames(module.audio, clip_s) for clip_s in sample.audio_s) if module.audio is not None else ()


def image_patch_counts(model: Model, module: ModelModule, sample: Sample) -> tuple[int, ...]:
    """Patches of each image (or tile) of a sample; empty for modules without vision."""
    if module.vision is None:
        return ()
    counts = (image_tokens(module.vision, size, _merge_after(model, module)) for size in sample.images)
    return tuple(count for count in counts for _ in range(module.vision.tiles))


def _merge_after(model: Model, module: ModelModule) -> int:
    consumers = (model.module(edge.consumer) for edge in model.edges if edge.producer == module.name)
    return max((c.projector.merge for c in consumers if c.projector is not None), default=1)


def _lengths(model: Model, module: ModelModule, sample: Sample, lengths: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    if module.recorded:
        return (1,)  # its layers were recorded for samples as a whole
    if module.vision is not None:
        tiles, extra = module.vision.tiles, 1 if module.vision.class_token else 0
        tokens = [patches + extra for patches in image_patch_counts(model, module, sample)]
        joined = tiles if module.vision.joint_tiles else 1
        return tuple(sum(tokens[first : first + joined]) for first in range(0, len(tokens), joined))
    if module.audio is not None:
        return tuple(module.audio.tokens(frames) for frames in audio_clip_frames(module, sample))
    if module.kind in ("projector", "encoder"):
        return tuple(_tokens_of(module, length) for length in _read_lengths(model, module, lengths))
    return (own_tokens(module, sample) + _incoming(model, module, ("merge", "hidden"), lengths),)


def _tokens_of(module: ModelModule, incoming: int) -> int:
    """Tokens of a projector or an `encoder` for one sequence of so many that it reads."""
    if module.form is not None and module.form.queries:
        return module.form.read_by_queries(incoming)[0]
    if module.form is not None and module.form.front:
        return int(incoming * row_ratio(module.form.front))
    if module.projector is not None:
        return incoming // module.projector.pool // module.projector.merge
    return incoming


def _read_lengths(model: Model, module: ModelModule, lengths: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Tokens of each sequence that a projector or an `encoder` reads."""
    producer = next(edge.producer for edge in model.edges if edge.consumer == module.name)
    return output_lengths(model.module(producer), lengths[producer])


def _incoming(model: Model, module: ModelModule, kinds: tuple[str, ...], lengths: dict[str, tuple[int, ...]]) -> int:
    return sum(
        sum(output_lengths(model.module(edge.producer), lengths[edge.producer]))
        for edge in model.edges
        if edge.consumer == module.name and edge.kind in kinds
    )


def _input_elements(model: Model, module: ModelModule, sample: Sample) -> int:
    if module.vision is not None:
        values_per_patch = module.vision.channels * module.vision.temporal_patch * module.vision.patch**2
        return sum(image_patch_counts(model, module, sample)) * values_per_patch
    if module.audio is not None:
        return sum(audio_clip_frames(module, sample)) * module.audio.mel_bins
    return own_tokens(module, sample) if module.vocabulary is not None else 0


def _window_pairs(length: int, shape: Transformer | None) -> int:
    """Pairs within windows. A window that slides is counted like whole causal attention, both sides of the diagonal:
    the square of the first window, then twice the window for every further row."""
    if shape is None or shape.window_tokens is None or length <= shape.window_tokens:
        return length**2
    window = shape.window_tokens
    if shape.sliding:
        return window**2 + 2 * window * (length - window)
    return length // window * window**2 + (length % window) ** 2


def _one_sample(model: Model, sample: Sample) -> dict[str, Load]:
    lengths = sequence_lengths(model, sample)
    loads: dict[str, Load] = {}
    for module in model.modules:
        own = lengths[module.name]
        context = _incoming(model, module, ("input", "cross_attention", "hidden"), lengths)
        is_language_model = module.kind == "language_model"
        context_pairs = sum(own) * context if is_language_model else 0
        if is_language_model and module.form is not None and module.form.together:
            context += sum(own)  # keys are those of the other module's rows and of its own
            context_pairs = sum(own) * context
        if module.form is not None and module.form.queries:
            read = _read_lengths(model, module, lengths)
            sides = [module.form.read_by_queries(length) for length in read]
            context = sum(read) + (sum(own) if module.form.together else 0)
            context_pairs = sum(queries * keys for queries, keys in sides)
        loads[module.name] = Load() + Load(
            sequences=len(own),
            tokens=sum(own),
            pairs=sum(length**2 for length in own),
            window_pairs=sum(_window_pairs(length, module.transformer) for length in own),
            context_tokens=context,
            context_pairs=context_pairs,
            input_elements=_input_elements(model, module, sample),
            targets=max(0, own_tokens(module, sample) - 1) if is_language_model else 0,
            outputs=sum(output_lengths(module, own)),
            chunk_tokens=sum(-(-length // CHUNK) * CHUNK for length in own),
        )
    return loads
