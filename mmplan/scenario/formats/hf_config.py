"""Hugging Face config.json files as a `Model`: bundled by name or anywhere on disk. Needs no transformers."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.document import listed, read_text, shown
from mmplan.scenario.formats.hf_families import llava, mllama, qwen2_5_omni, qwen2_5_vl, qwen2_audio, qwen2_vl
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import Model

FAMILIES: Mapping[str, Callable[[Fields, str], Model]] = {
    "llava": llava,
    "mllama": mllama,
    "qwen2_5_omni": qwen2_5_omni,
    "qwen2_5_omni_thinker": qwen2_5_omni,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen2_audio": qwen2_audio,
    "qwen2_vl": qwen2_vl,
}


@cache
def bundled_configs() -> dict[str, Path]:
    """Name -> file of the configs that come with mmplan."""
    folder = Path(__file__).parents[1] / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def read_hf_config(path: Path) -> Model:
    """The model that a config.json describes.

    Raises:
        InputError: not a JSON object, an unknown model_type, or a size that is missing or impossible.
    """
    try:
        values = json.loads(read_text(path, "config"))
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise InputError(f"not valid JSON: {getattr(error, 'msg', error)}", file=path, line=line) from error
    if not isinstance(values, dict):
        raise InputError(f"expected a JSON object, found {shown(values)}", file=path)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InputError(f"unknown model_type {shown(kind)}; known: {listed(FAMILIES, 40)}", file=path)
    name = path.parent.name if path.stem == "config" else path.stem
    return FAMILIES[kind](Fields(values=values, defaults={}, file=path), name)
