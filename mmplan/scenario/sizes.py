"""The `data` part of a scenario file as `Data`, checked against the modules that read it."""

from collections.abc import Callable
from pathlib import Path

from mmplan.scenario.document import Document
from mmplan.scenario.manifest import MAX_CLIP_S, MAX_TOKENS, read_manifest
from mmplan.scenario.scenario import Data, Distribution, Model, Sample
from mmplan.scenario.schema import DataSpec

NONE = Distribution(values=(0.0,), weights=(1.0,))
MAX_ITEMS = 10_000  # images or clips of a sample: an hour of video at 2.7 frames a second


def data_from_spec(spec: DataSpec, model: Model, document: Document) -> Data:
    """The data.

    Raises:
        InputError: a modality without data or data without its module, counts that are not whole, sizes missing.
    """
    if model.recorded is not None:
        for key in sorted(spec.model_fields_set):
            raise document.error(("data", key), "the samples of this model were recorded; remove this key")
        return Data(text_tokens=NONE, images=NONE, image_sizes=(), audio_clips=NONE, audio_s=NONE, speech_tokens=NONE)
    from_rows = spec.manifest is not None
    data = _from_manifest(spec, document) if from_rows else _from_distributions(spec, model, document)
    _check_modalities(data, model, document)
    return data


def _from_manifest(spec: DataSpec, document: Document) -> Data:
    for key in sorted(spec.model_fields_set - {"manifest"}, key=lambda key: document.lines.get(("data", key), 0)):
        raise document.error(("data", key), "a manifest gives all sizes; remove this key or the manifest")
    assert spec.manifest is not None
    rows = read_manifest(document.file.parent / Path(spec.manifest), document)
    return Data(
        text_tokens=NONE,
        images=NONE,
        image_sizes=(),
        audio_clips=NONE,
        audio_s=NONE,
        speech_tokens=NONE,
        manifest=rows,
    )


def _from_distributions(spec: DataSpec, model: Model, document: Document) -> Data:
    if spec.text_tokens is None:
        raise document.error(("data", "text_tokens"), "this key is missing: text tokens per sample, or a manifest")
    counts = {
        "text_tokens": spec.text_tokens,
        "images": spec.images or NONE,
        "audio_clips": spec.audio_clips or NONE,
        "speech_tokens": spec.speech_tokens or NONE,
    }
    limits = {"text_tokens": MAX_TOKENS, "images": MAX_ITEMS, "audio_clips": MAX_ITEMS, "speech_tokens": MAX_TOKENS}
    for key, distribution in counts.items():
        for value in distribution.values:
            if value != int(value):
                raise document.error(("data", key), f"expected whole numbers, found {value:g}")
            if value > limits[key]:
                raise document.error(("data", key), f"expected at most {limits[key]:,} in a sample, found {value:,.0f}")
    if spec.audio_seconds is not None and max(spec.audio_seconds.values) > MAX_CLIP_S:
        message = f"expected clips of at most {MAX_CLIP_S:,.0f} s, found {max(spec.audio_seconds.values):,.0f} s"
        raise document.error(("data", "audio_seconds"), message)
    if min(spec.text_tokens.values) < 1:
        raise document.error(("data", "text_tokens"), "expected at least 1 text token in every sample, found 0")
    sizes = spec.image_size or _fixed_sizes(model)
    if max(counts["images"].values) > 0 and not sizes:
        raise document.error(("data", "image_size"), "this key is missing: the vision module has no fixed image_size")
    clips = max(counts["audio_clips"].values) > 0
    if clips and (spec.audio_seconds is None or min(spec.audio_seconds.values) <= 0):
        found = "none" if spec.audio_seconds is None else "0 s"
        raise document.error(("data", "audio_seconds"), f"audio clips need a length above 0, found {found}")
    return Data(
        text_tokens=counts["text_tokens"],
        images=counts["images"],
        image_sizes=sizes if max(counts["images"].values) > 0 else (),
        audio_clips=counts["audio_clips"],
        audio_s=(spec.audio_seconds or NONE) if clips else NONE,
        speech_tokens=counts["speech_tokens"],
    )


def _fixed_sizes(model: Model) -> tuple[tuple[int, int], ...]:
    """The image size of the vision modules, when they have a fixed one."""
    fixed = [m.vision.image_size for m in model.modules if m.vision is not None and m.vision.image_size is not None]
    return ((fixed[0], fixed[0]),) if fixed else ()


def _check_modalities(data: Data, model: Model, document: Document) -> None:
    """Images if and only if a vision module reads them; the same for audio and for speech tokens, which a talker or a
    language model of sound in codes produces."""
    talkers = {edge.consumer for edge in model.edges if edge.kind == "hidden"}
    talkers |= {m.name for m in model.modules if m.kind == "language_model" and m.modality == "speech"}
    uses = {
        "images": [m.name for m in model.modules if m.vision is not None],
        "audio_clips": [m.name for m in model.modules if m.audio is not None],
        "speech_tokens": [m.name for m in model.modules if m.name in talkers],
    }
    given = {
        "images": _any(data.images, data.manifest, lambda row: len(row.images)),
        "audio_clips": _any(data.audio_clips, data.manifest, lambda row: len(row.audio_s)),
        "speech_tokens": _any(data.speech_tokens, data.manifest, lambda row: row.speech_tokens),
    }
    for key, modules in uses.items():
        at = ("data", "manifest" if data.manifest else key)
        word = key.replace("_", " ")
        if modules and not given[key]:
            raise document.error(at, f"module '{modules[0]}' has nothing to work on: the data hold no {word}")
        if given[key] and not modules:
            raise document.error(at, f"the data hold {word}, but no module reads them")
    _check_image_sizes(data, model, document)
    _check_clips(data, model, document)


def _any(distribution: Distribution, rows: tuple[Sample, ...], count: Callable[[Sample], int]) -> bool:
    if rows:
        return any(count(row) > 0 for row in rows)
    return any(
        value > 0 and weight > 0 for value, weight in zip(distribution.values, distribution.weights, strict=True)
    )


def _check_image_sizes(data: Data, model: Model, document: Document) -> None:
    """At native resolution every image has at least one patch a side."""
    at = ("data", "manifest" if data.manifest else "image_size")
    sizes = {size for row in data.manifest for size in row.images} | set(data.image_sizes)
    for module in model.modules:
        if module.vision is None or module.vision.image_size is not None:
            continue
        for height, width in sorted(sizes):
            if min(height, width) < module.vision.patch:
                message = f"an image of {height}x{width} pixels is smaller than a patch of '{module.name}'"
                raise document.error(at, f"{message} ({module.vision.patch})")


def _check_clips(data: Data, model: Model, document: Document) -> None:
    """No clip is longer than what its encoder pads to or has positions for."""
    at = ("data", "manifest" if data.manifest else "audio_seconds")
    longest_s = max([*data.audio_s.values, *(clip for row in data.manifest for clip in row.audio_s)])
    for module in model.modules:
        audio = module.audio
        if audio is None:
            continue
        if audio.pad_s is not None and longest_s > audio.pad_s:
            message = f"a clip of {longest_s:g} s is longer than the {audio.pad_s:g} s that '{module.name}' pads to"
            raise document.error(at, message)
        if audio.positions and longest_s * audio.frames_per_s / 2 > audio.positions:
            tokens = round(longest_s * audio.frames_per_s / 2)
            message = f"a clip of {longest_s:g} s has {tokens} tokens, '{module.name}' has {audio.positions} positions"
            raise document.error(at, message)
