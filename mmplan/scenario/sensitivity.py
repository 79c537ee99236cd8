"""Sensitivity files: how much the loss reacts to each layer, and the runs of layers that react most.

    {"schema": "mmplan.sensitivity/1", "layers": {"vision.0": 0.43, "llm.0": {"vision": 2.15, "text": 1.98}}}

A value is, for example, the largest Hessian eigenvalue of the loss over the layer's parameters. A plain number belongs
to the modality of the layer's module; a mapping gives one value for each modality of the samples it was measured on.
Layers that are not named count for nothing. A layer is sensitive when it is above the percentile of any modality's
values.
"""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from mmplan.errors import InputError
from mmplan.scenario.document import Document, KeyPath, did_you_mean, listed, read_text, shown
from mmplan.scenario.layer_ids import layer_hint, module_layer_ids, shorten_ids
from mmplan.scenario.scenario import Modality, Model

SCHEMA = "mmplan.sensitivity/1"
MODALITIES: tuple[str, ...] = get_args(Modality)


def sensitive_zones(
    name: str, percentile: float, model: Model, document: Document
) -> list[tuple[str, tuple[str, ...]]]:
    """Runs of neighbouring sensitive layers of a module, each with its short name.

    Raises:
        InputError: the file cannot be read, is no sensitivity file, or names a layer that the model does not have.
    """
    at: KeyPath = ("constraints", "sensitivity")
    path = document.file.parent / name
    if not path.is_file():
        raise document.error(at, f"no such file {shown(name)}")
    values = read_sensitivity(path, model)
    limits = {modality: _percentile(list(branch.values()), percentile) for modality, branch in values.items()}
    above = {
        layer for modality, branch in values.items() for layer, value in branch.items() if value > limits[modality]
    }
    found = []
    for module in model.modules:
        layers = module_layer_ids(module)
        for first, end in _runs([layer in above for layer in layers]):
            found.append((" ".join(shorten_ids(layers[first:end])), layers[first:end]))
    return found


def read_sensitivity(path: Path, model: Model) -> dict[str, dict[str, float]]:
    """Modality -> layer id -> value.

    Raises:
        InputError: one sentence with file and key.
    """
    try:
        values = json.loads(read_text(path, "sensitivity file"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"not valid JSON: {error}", file=path) from error
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        found = shown(values.get("schema") if isinstance(values, dict) else values)
        raise InputError(f"expected a sensitivity file with schema '{SCHEMA}', found {found}", file=path, key="schema")
    unknown = sorted(set(values) - {"schema", "layers", "source"})
    if unknown:
        hint = did_you_mean(unknown[0], ("layers", "source")) or "; known keys: 'schema', 'layers', 'source'"
        raise InputError(f"unknown key{hint}", file=path, key=unknown[0])
    layers = values.get("layers")
    if not isinstance(layers, dict) or not layers:
        raise InputError(f"expected a value for each layer, found {shown(layers)}", file=path, key="layers")
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


def _modality(name: str, path: Path, key: str) -> str:
    if name not in MODALITIES:
        hint = did_you_mean(name, MODALITIES) or f"; known: {listed(MODALITIES)}"
        raise InputError(f"unknown modality {shown(name)}{hint}", file=path, key=key)
    return name


def _number(value: Any, path: Path, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"expected a finite number, found {shown(value)}", file=path, key=key)
    return float(value)


def _percentile(values: list[float], percent: float) -> float:
    """By linear interpolation between the two nearest values (numpy's default)."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _runs(marked: list[bool]) -> list[tuple[int, int]]:
    """(first, end) of each run of neighbours that are marked."""
    changes = [place for place, (a, b) in enumerate(pairwise([False, *marked, False])) if a != b]
    return list(zip(changes[::2], changes[1::2], strict=True))
