"""Models that launch files only name: bundled configs of multimodal models, and sizes of published text models."""

import re
from functools import cache
from importlib import resources
from typing import Any

import yaml

from mmplan.scenario.formats.hf_config import bundled_configs


@cache
def _text_models() -> tuple[dict[str, Any], ...]:
    text = resources.files("mmplan.scenario").joinpath("text_models.yaml").read_text(encoding="utf-8")
    return tuple(yaml.safe_load(text))


def short_name(name: str) -> str:
    """`Qwen/Qwen2.5-VL-7B-Instruct` or `/models/Qwen2.5-VL-7B-Instruct/` -> `qwen2.5-vl-7b-instruct`."""
    return re.split(r"[/\\]", name.strip().rstrip("/\\"))[-1][:200].lower().replace("_", "-")


def known_model(name: str) -> dict[str, Any] | None:
    """The `model` of a scenario for a published name, None where the name is not known."""
    short = short_name(name)
    for bundled in bundled_configs():
        if short == bundled or short.startswith((f"{bundled}-", f"{bundled}_")):
            return {"hf_config": bundled}
    for row in _text_models():
        for pattern in row["names"]:
            if re.match(rf"(?:{pattern})(?:-(?!vl\b|omni\b|audio\b|vision\b|math-rm)|$)", short):
                return {"modules": {"llm": {"kind": "language_model", **row["llm"]}}}
    return None
