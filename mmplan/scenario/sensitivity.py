"""Sensitivity files: how much the loss reacts to each layer, and the runs of layers that react most.

    {"schema": "mmplan.sensitivity/2", "rule": "percentile:85",
     "layers": {"vision.0": 0.43, "llm.0": {"vision": 2.15, "text": 1.98}}}

A value is, for example, the largest Hessian eigenvalue of the loss over the layer's parameters. A plain number belongs
to the modality of the layer's module; a mapping gives one value for each modality of the samples it was measured on.
Layers that are not named count for nothing. A layer is sensitive when `rule` takes it out of the values of any
modality. `source` says how the values came about and `details` what is known of each; planners read neither. Version 1
has neither `rule` nor `details`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from mmplan.errors import InputError
from mmplan.scenario.document import Document, KeyPath, did_you_mean, listed, read_text, shown
from mmplan.scenario.layer_ids import layer_hint, module_layer_ids, shorten_ids
from mmplan.scenario.scenario import Modality, Model
from mmplan.scenario.zone_rules import DEFAULT_RULE, ZoneRule, parse_rule

SCHEMA = "mmplan.sensitivity/2"
_KEYS = {"mmplan.sensitivity/1": ("layers", "source"), SCHEMA: ("layers", "source", "rule", "details")}
MODALITIES: tuple[str, ...] = get_args(Modality)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """`values`: modality -> layer id -> value; `rule`: which of them are sensitive."""

    values: Mapping[str, Mapping[str, float]]
    rule: ZoneRule

    def sensitive(self) -> set[str]:
        """Layers that are so in any modality."""
        return {layer for branch in self.values.values() for layer in self.rule.sensitive(branch)}


def sensitive_zones(
    name: str, percentile: float | None, model: Model, document: Document
) -> list[tuple[str, tuple[str, ...]]]:
    """Runs of neighbouring sensitive layers of a module, each with its short name.

    Args:
        percentile: of the scenario; None: the file's own rule.

    Raises:
        InputError: the file cannot be read, is no sensitivity file, or names a layer that the model does not have.
    """
    at: KeyPath = ("constraints", "sensitivity")
    path = document.file.parent / name
    if not path.is_file():
        raise document.error(at, f"no such file {shown(name)}")
    found = read_sensitivity(path, model)
    if percentile is not None:
        found = Sensitivity(values=found.values, rule=ZoneRule(kind="percentile", number=percentile))
    return zone_runs(found.sensitive(), model)


def zone_runs(layers: set[str], model: Model) -> list[tuple[str, tuple[str, ...]]]:
    """Runs of neighbours of a module among these layers, each with its short name."""
    found = []
    for module in model.modules:
        own = module_layer_ids(module)
        for first, end in _runs([layer in layers for layer in own]):
            found.append((" ".join(shorten_ids(own[first:end])), own[first:end]))
    return found


def read_sensitivity(path: Path, model: Model) -> Sensitivity:
    """The values and the rule of a file.

    Raises:
        InputError: one sentence with file and key.
    """
    try:
        values = json.loads(read_text(path, "sensitivity file"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"not valid JSON: {error}", file=path) from error
    schema = values.get("schema") if isinstance(values, dict) else values
    if not isinstance(values, dict) or not isinstance(schema, str) or schema not in _KEYS:
        raise InputError(
            f"expected a sensitivity file with schema '{SCHEMA}', found {shown(schema)}", file=path, key="schema"
        )
    known = _KEYS[schema]
    unknown = sorted(set(values) - {"schema", *known})
    if unknown:
        hint = did_you_mean(unknown[0], known) or f"; known keys: {listed(['schema', *known])}"
        raise InputError(f"unknown key{hint}", file=path, key=unknown[0])
    layers = values.get("layers")
    if not isinstance(layers, dict) or not layers:
        raise InputError(f"expected a value for each layer, found {shown(layers)}", file=path, key="layers")
    return Sensitivity(values=_values(layers, model, path), rule=_rule(values.get("rule"), path))


def _values(layers: dict[str, Any], model: Model, path: Path) -> dict[str, dict[str, float]]:
    names = {module.name: module_layer_ids(module) for module in model.modules}
    modality_of = {layer: module.modality for module in model.modules for layer in module_layer_ids(module)}
    result: dict[str, dict[str, float]] = {}
    for layer, value in layers.items():
        key = f"layers.{layer}"
        if layer not in modality_of:
            hint = layer_hint(layer, layer.rpartition(".")[0], names)
            raise InputError(f"unknown layer {shown(layer)}{hint}", file=path, key=key)
        branches = value if isinstance(value, dict) else {modality_of[layer]: value}
        for modality, number in branches.items():
            result.setdefault(_modality(modality, path, key), {})[layer] = _number(number, path, key)
    return result


def _rule(text: Any, path: Path) -> ZoneRule:
    if text is None:
        return DEFAULT_RULE
    try:
        return parse_rule(str(text))
    except ValueError as error:
        raise InputError(str(error), file=path, key="rule") from error


def _modality(name: str, path: Path, key: str) -> str:
    if name not in MODALITIES:
        hint = did_you_mean(name, MODALITIES) or f"; known: {listed(MODALITIES)}"
        raise InputError(f"unknown modality {shown(name)}{hint}", file=path, key=key)
    return name


def _number(value: Any, path: Path, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"expected a finite number, found {shown(value)}", file=path, key=key)
    return float(value)


def _runs(marked: list[bool]) -> list[tuple[int, int]]:
    """(first, end) of each run of neighbours that are marked."""
    changes = [place for place, (a, b) in enumerate(pairwise([False, *marked, False])) if a != b]
    return list(zip(changes[::2], changes[1::2], strict=True))
