"""The samples of a scenario that launch files describe: files say the sequence, and hardly what fills it.

Each sample fills the sequence: with one image or clip where the model has an encoder, and with text for the rest. Every
number that no file says is assumed and told.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmplan.cost_models.loads import sequence_lengths
from mmplan.errors import InputError
from mmplan.planner.formats.launch_model import language_module
from mmplan.planner.formats.launch_told import Told
from mmplan.scenario.document import Document
from mmplan.scenario.formats.launch.facts import SetUp
from mmplan.scenario.load import scenario_of
from mmplan.scenario.scenario import Sample, Scenario

DEFAULT_SEQUENCE = 2048
MOST_SEQUENCE = 100_000_000
DEFAULT_AUDIO_S = 10
DEFAULT_IMAGE = 448  # pixels per side where a file speaks of images and of no size


def _sequence(setup: SetUp, told: Told) -> int:
    sequence = setup.count("sequence", most=MOST_SEQUENCE)
    if sequence is None:
        told.warnings.append(f"no file says the sequence length: {DEFAULT_SEQUENCE:,} tokens are assumed")
    return sequence or DEFAULT_SEQUENCE


def fill_data(fragment: dict[str, Any], kinds: Collection[str], setup: SetUp, told: Told) -> None:
    """Samples that fill the sequence; with an encoder, one image (or clip) in each and text for the rest."""
    sequence = _sequence(setup, told)
    encoders = {kind for kind in kinds if kind.endswith("encoder")}
    least: dict[str, Any] = {"text_tokens": 1}
    least |= {"images": 1, "image_size": DEFAULT_IMAGE} if "vision_encoder" in encoders else {}
    least |= {"audio_clips": 1, "audio_seconds": 1} if "audio_encoder" in encoders else {}
    spoken = {"speech_tokens": 1} if "talker" in kinds else {}
    least |= spoken
    scenario = _checked(fragment | {"data": least}, setup)
    data: dict[str, Any] = dict(spoken)
    if spoken:
        told.warnings.append("the talker is read as frozen, with one token: such trainers run the thinker alone")
    sample = Sample(text_tokens=0, images=())
    if "vision_encoder" in encoders:
        data["images"] = images = _images(setup, scenario)
        pixels = _image_size(setup, scenario, told)
        if pixels is not None:
            data["image_size"] = pixels
        side = pixels or DEFAULT_IMAGE  # an encoder with a size of its own takes no other
        sample = Sample(text_tokens=0, images=((side, side),) * images)
        cut = f", cut into {images} tiles at most" if images > 1 else ""
        told.warnings.append(f"no file says how many images a sample has: one{cut} is assumed; change data.images")
    if "audio_encoder" in encoders:
        data |= {"audio_clips": 1, "audio_seconds": DEFAULT_AUDIO_S}
        sample = replace(sample, audio_s=(float(DEFAULT_AUDIO_S),))
        told.warnings.append(
            f"no file says how much audio a sample has: a clip of {DEFAULT_AUDIO_S} s is assumed; change data"
        )
    used = 0
    if data:
        llm = language_module(scenario.model)
        used = sum(sequence_lengths(scenario.model, sample).get(llm.name, (0,)))
        crossed = any(edge.kind == "cross_attention" for edge in scenario.model.edges)
        used = 0 if crossed else used
        if used >= sequence:
            told.warnings.append(
                f"images and sound make {used:,} tokens, the sequence has {sequence:,}: one text token is added"
            )
    fragment["data"] = {"text_tokens": max(1, sequence - used), **data}
    if used:
        told.read.append(f"sequence of {sequence:,} tokens, {used:,} of them of images and sound")
    _checked(fragment, setup)


def _images(setup: SetUp, scenario: Scenario) -> int:
    """One image, or its tiles, where a file cuts it for an encoder of fixed size that does not know of tiles."""
    vision = next(module.vision for module in scenario.model.modules if module.vision is not None)
    if vision.image_size is None or vision.tiles > 1:
        return 1
    tiles = setup.count("tiles", most=1_000) or 1
    return tiles + setup.flag("thumbnail") if tiles > 1 else 1


def _image_size(setup: SetUp, scenario: Scenario, told: Told) -> int | None:
    """Pixels per side, None where the encoder's own size is fixed."""
    vision = next(module.vision for module in scenario.model.modules if module.vision is not None)
    if vision.image_size is not None:
        return None
    size = setup.count("image_size", most=100_000)
    if size is None:
        told.warnings.append(f"no file says how large images are: {DEFAULT_IMAGE} pixels a side are assumed")
    return size or DEFAULT_IMAGE


def _checked(fragment: Mapping[str, Any], setup: SetUp) -> Scenario:
    """The scenario that the fragment is; InputError names the first file."""
    values = {key: value for key, value in fragment.items() if value not in (None, {})}
    try:
        return scenario_of(Document(file=Path(setup.files[0]), values=values, lines={}))
    except InputError as error:
        raise InputError(error.message, file=setup.files[0], key=error.key) from None
