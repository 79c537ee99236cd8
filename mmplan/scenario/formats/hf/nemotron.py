"""Nemotron-H and Nemotron Omni: each block is one mixer (Mamba 2, attention, an MLP or experts); RADIO, a conformer."""

from dataclasses import replace

from mmplan.scenario.document import shown
from mmplan.scenario.formats.hf.conformers import parakeet
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import tower_of
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import merged, projector_module
from mmplan.scenario.scenario import Model, ModelModule

LEGACY = {
    "llm_config": "text_config",
    "sound_config": "audio_config",
    "vit_hidden_size": "vision_hidden_size",
}


def omni(config: Fields, name: str) -> Model:
    """Names of released files (`llm_config`, `sound_config`, `vit_hidden_size`) count where the class's are absent."""
    renamed = {new: config.values[old] for old, new in LEGACY.items() if old in config.values}
    config = replace(config, values={**renamed, **config.values})
    llm, ratio = text_module(config, "text_config"), config.get("downsample_ratio")
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0.01 <= ratio <= 1:
        raise config.error("downsample_ratio", f"expected a number from 0.01 to 1, found {shown(ratio)}")
    vision, merge = tower_of(config), int(1 / ratio) ** 2
    inner, width = config.count("projector_hidden_size"), config.count("vision_hidden_size")
    if width != vision.output_width:
        raise config.error("vision_hidden_size", f"expected the tower's width {vision.output_width}, found {width}")
    text = config.part("text_config")
    extra = 2 * vision.output_width if text.optional("num_nextn_predict_layers", least=0) else 0
    dims = (vision.output_width * merge, inner, llm.output_width)
    seen = projector_module(dims, name="vision_projector", merge=merge, norm="rms", bias=False, stored=extra)
    ways: list[tuple[ModelModule, ...]] = [(vision, seen)]
    if config.has("audio_config"):
        ear = config.part("audio_config").read_as("parakeet_encoder")  # files say `parakeet`
        ear = replace(ear, values={"attention_bias": False, **ear.values})
        audio = parakeet(ear)
        dims = (audio.output_width, ear.count("projection_hidden_size"), llm.output_width)
        bias = ear.flag("projection_bias")
        heard = projector_module(dims, name="audio_projector", modality="audio", norm="rms", bias=bias)
        ways.append((audio, heard))
    return merged(name, llm, *ways)
