"""Hugging Face config.json files as a `Model`: bundled by name or anywhere on disk. Needs no transformers."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.document import listed, read_text, shown
from mmplan.scenario.formats.hf.gemma3 import gemma3
from mmplan.scenario.formats.hf.glm4v import glm4v_moe
from mmplan.scenario.formats.hf.internvl import internvl, internvl_chat
from mmplan.scenario.formats.hf.kimi import kimi_k25
from mmplan.scenario.formats.hf.llama4 import llama4
from mmplan.scenario.formats.hf.llava_next import llava_next, llava_onevision
from mmplan.scenario.formats.hf.mistral3 import mistral3
from mmplan.scenario.formats.hf.plain import PLAIN, plain
from mmplan.scenario.formats.hf.qwen3_vl import qwen3_vl
from mmplan.scenario.formats.hf.refused import REFUSED
from mmplan.scenario.formats.hf_families import llava, mllama, qwen2_5_omni, qwen2_5_vl, qwen2_audio, qwen2_vl
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import Model

FAMILIES: Mapping[str, Callable[[Fields, str], Model]] = {
    "gemma3": gemma3,
    "glm4v_moe": glm4v_moe,
    "internvl": internvl,
    "internvl_chat": internvl_chat,
    "kimi_k25": kimi_k25,
    "llama4": llama4,
    "llava": llava,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "mistral3": mistral3,
    "mllama": mllama,
    "qwen2_5_omni": qwen2_5_omni,
    "qwen2_5_omni_thinker": qwen2_5_omni,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen2_audio": qwen2_audio,
    "qwen2_vl": qwen2_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
    **dict.fromkeys(PLAIN, plain),
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
    if isinstance(kind, str) and kind in REFUSED:
        raise InputError(f"model_type {shown(kind)} is not supported: {REFUSED[kind]}", file=path)
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InputError(f"unknown model_type {shown(kind)}; known: {listed(sorted(FAMILIES), 40)}", file=path)
    name = path.parent.name if path.stem == "config" else path.stem
    model = FAMILIES[kind](Fields(values=values, defaults={}, file=path), name)
    _check_widths(model, path)
    return model


def _check_widths(model: Model, path: Path) -> None:
    """Sparse files take defaults of several classes, which need not fit together."""
    for edge in model.edges:
        producer, consumer = model.module(edge.producer), model.module(edge.consumer)
        if edge.kind in ("merge", "add") and producer.output_width != consumer.output_width:
            message = f"'{producer.name}' gives width {producer.output_width}, '{consumer.name}' has hidden size "
            raise InputError(message + str(consumer.output_width), file=path)
