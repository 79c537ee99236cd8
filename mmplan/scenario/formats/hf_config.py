"""Hugging Face config.json files as a `Model`: bundled by name or anywhere on disk. Needs no transformers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mmplan.errors import InputError
from mmplan.scenario.document import did_you_mean, listed, read_text, shown
from mmplan.scenario.formats.hf.class_defaults import defaults_of, kinds_of_model
from mmplan.scenario.formats.hf.families import FAMILIES
from mmplan.scenario.formats.hf.look_alikes import look_alike
from mmplan.scenario.formats.hf.refused import refusal
from mmplan.scenario.formats.hf_fields import Fields, Log
from mmplan.scenario.scenario import Model

MAX_DEPTH = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class HfConfig:
    """A config as it was read: the model, the file's values, and what was asked of them."""

    model: Model
    kind: str
    values: Mapping[str, Any]
    log: Log


@cache
def bundled_configs() -> dict[str, Path]:
    """Name -> file of the configs that come with mmplan."""
    folder = Path(__file__).parents[1] / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def config_file(path: Path) -> Path:
    """The file of a name that may be a checkpoint's folder, as transformers takes it."""
    return path / "config.json" if path.is_dir() else path


def read_hf_config(path: Path) -> Model:
    """The model that a config.json describes; InputError as in `read_config`, and where no part of it gives a loss."""
    model = read_config(path).model
    if not any(module.kind == "language_model" for module in model.modules):
        reason = "nothing gives a loss: list its modules in a scenario with a language model behind them"
        names, sides = {one.name for one in model.modules}, {one.modality for one in model.modules}
        met = any(edge.kind != "input" for edge in model.edges) or names & {"decoder", "detr_decoder"}
        if "text" in sides and len(sides) > 1 and (not met or "embedding" in names):
            reason = "its contrastive loss spans the whole global batch, so microbatches cannot be computed one by one"
        raise InputError(f"the model has no language model, {reason}", file=path)
    return model


def read_config(path: Path) -> HfConfig:
    """The model that a config.json describes, with what was read, defaulted and left out.

    Raises:
        InputError: not a JSON object, another kind of file, an unknown model_type, one that `architectures`
            contradicts, or a size that is missing or impossible.
    """
    values = read_object(path)
    kind = _kind_of(values, path)
    fields = Fields(values=values, kind=kind, defaults=defaults_of(kind).keys, file=path)
    name = path.parent.name if path.stem == "config" else path.stem
    model = FAMILIES[kind](fields, name)
    _check_widths(model, path)
    return HfConfig(model=model, kind=kind, values=values, log=fields.log)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object whose nesting is that of a config; InputError otherwise."""
    try:
        values = json.loads(read_text(path, "config"))
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        message = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", error)
        raise InputError(f"not valid JSON: {message}", file=path, line=line) from error
    if not isinstance(values, dict):
        raise InputError(f"expected a JSON object, found {shown(values)}", file=path)
    if _depth(values) > MAX_DEPTH:
        raise InputError(f"nested deeper than {MAX_DEPTH} levels", file=path)
    return values


def _depth(value: object) -> int:
    levels, inside = 0, [value]
    while inside and levels <= MAX_DEPTH:
        levels += 1
        nested = [item for item in inside if isinstance(item, dict | list)]
        inside = [item for group in nested for item in (group.values() if isinstance(group, dict) else group)]
    return levels


def _kind_of(values: Mapping[str, Any], path: Path) -> str:
    """`model_type`, checked against `architectures`, or what follows from these where there is none."""
    kind, named = values.get("model_type"), values.get("architectures")
    model = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    owners = kinds_of_model(model) if model is not None else ()
    if kind is None or kind == "":
        other = look_alike(values)
        if other is not None:
            raise InputError(f"this is {other}, not the config.json of a model", file=path)
        if len(owners) != 1:
            found = listed(values, 8) or "no keys"
            raise InputError(f"expected a model_type, found {found}", file=path, key="model_type")
        kind = owners[0]
    if not isinstance(kind, str):
        raise InputError(f"expected a name, found {shown(kind)}", file=path, key="model_type")
    reason = refusal(kind)
    if reason is not None:
        raise InputError(f"model_type {shown(kind)} is not supported: {reason}", file=path)
    if kind not in FAMILIES:
        hint = did_you_mean(kind, FAMILIES)
        if owners:
            hint = f"; architectures names {model}, a class of {listed(owners, 4)}"
        raise InputError(f"unknown model_type {shown(kind)}{hint or f'; known: {listed(sorted(FAMILIES))}'}", file=path)
    if owners and kind not in owners and defaults_of(kind).models:
        message = f"{model} is a class of {listed(owners, 4)}, and model_type is '{kind}': one of the two is wrong"
        raise InputError(message, file=path, key="architectures")
    return kind


def _check_widths(model: Model, path: Path) -> None:
    """Sparse files take defaults of several classes, which need not fit together."""
    for edge in model.edges:
        producer, consumer = model.module(edge.producer), model.module(edge.consumer)
        if edge.kind in ("merge", "add") and producer.output_width != consumer.output_width:
            message = f"'{producer.name}' gives width {producer.output_width}, '{consumer.name}' has hidden size "
            raise InputError(message + str(consumer.output_width), file=path)
