"""Pretrained weights: each rank reads the tensors of its own pieces from a folder of safetensors files, and no others.

Saved names often are those of an older layout. Where the model is of transformers, the library's own conversion mapping
translates them, merging and transposing included; models of one's own are read by the names they have.
"""

import json
import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mmplan.errors import InputError
from mmplan.runtime.ghost.units import find_units

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor in a file; `pattern` names the conversion it takes part in, None: it is the parameter."""

    key: str
    file: Path
    pattern: str | None


class Pretrained:
    """The weights in a folder, by the parameter names of a model.

    Raises:
        InputError: there are none, or a file cannot be read.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self._folder, self._model = folder, model
        self._aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(id(parameter), []).append(name)
        self._units = find_units(model)
        self._converters: dict[str, Any] = {}
        self._saved: dict[str, list[_Saved]] = {}
        self._made_with: dict[str, str] = {}  # parameter -> the one whose conversion makes it too
        rename = self._renaming(model)
        for key, file in sorted(_files(folder).items(), key=lambda item: _natural(item[0])):
            name, pattern = rename(key)
            self._saved.setdefault(name, []).append(_Saved(key, file, pattern))
            targets = self._converters[pattern].target_patterns if pattern is not None else [""]
            self._made_with |= {name.replace(targets[0], other): name for other in targets[1:]}

    def value(self, name: str, like: Tensor) -> Tensor:
        """The parameter on the host, in the type it was saved in.

        Raises:
            InputError: it is not in the folder, or has another shape there.
        """
        name = self._known(name)
        saved = self._saved.get(self._made_with.get(name, name))
        if saved is None:
            raise InputError(f"no tensor for the parameter '{name}' of the model", file=self._folder)
        value = self._converted(name, saved) if saved[0].pattern is not None else _read(saved[0])
        if value.shape != like.shape:
            raise InputError(
                f"'{saved[0].key}' has shape {tuple(value.shape)}, '{name}' of the model {tuple(like.shape)}",
                file=saved[0].file,
            )
        return value

    def lacks(self, name: str) -> bool:
        """Whether a parameter is an adapter, trained in a unit that has frozen ones, and is not in the folder."""
        known = self._known(name)
        unit = next((unit for start, unit in self._units.items() if name.startswith(f"{start}.")), None)
        frozen = unit is not None and not all(parameter.requires_grad for parameter in unit.parameters())
        trained = self._model.get_parameter(name).requires_grad
        return frozen and trained and known not in self._saved and known not in self._made_with

    def _known(self, name: str) -> str:
        """The name by which the folder has a parameter: one of its own; where it is frozen inside what adds adapters to
        it, the longest that is left of its name without parts of it; or else the name itself."""
        parameter = self._model.get_parameter(name)
        for alias in self._aliases[id(parameter)]:
            if alias in self._saved or alias in self._made_with:
                return alias
        parts = name.split(".")
        inner = [saved for saved in self._saved if not parameter.requires_grad and _left_of(saved.split("."), parts)]
        return max(inner, key=len, default=name)

    def buffer(self, name: str) -> Tensor | None:
        """What a model keeps beside its parameters, under its own name; None where the folder has it not."""
        saved = self._saved.get(name, [])
        return _read(saved[0]) if len(saved) == 1 and saved[0].pattern is None else None

    def _converted(self, name: str, saved: list[_Saved]) -> Tensor:
        """By the library's own operations; they may make several parameters at once."""
        converter = deepcopy(self._converters[str(saved[0].pattern)])
        first = self._made_with.get(name, name)
        for item in saved:
            converter.add_tensor(first, item.key, item.pattern, _read(item))
        value = converter.convert(first, model=self._model, config=self._model.config)[name]
        tensor: Tensor = value[0] if isinstance(value, list) else value
        return tensor

    def _renaming(self, model: nn.Module) -> Any:
        """Saved name -> name in the model and conversion."""
        known = set(model.state_dict())
        if not hasattr(model, "base_model_prefix"):
            return lambda key: (key, None)
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
        except ImportError:  # before transformers 5 models held pairs of patterns
            pairs = list((getattr(model, "_checkpoint_conversion_mapping", None) or {}).items())
            return lambda key: (_replaced(key, pairs) if key not in known else key, None)
        mapping = get_model_conversion_mapping(model)
        renamings = [part for part in mapping if isinstance(part, WeightRenaming)]
        converters = [part for part in mapping if isinstance(part, WeightConverter)]
        self._converters = {pattern: part for part in converters for pattern in part.source_patterns}
        state = model.state_dict()
        prefix = model.base_model_prefix

        def rename(key: str) -> tuple[str, str | None]:
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in known and key in known:
                name, pattern = rename_source_key(key, [], [], prefix, state)
            return str(name), pattern

        return rename


def _files(folder: Path) -> dict[str, Path]:
    """Saved name -> file."""
    if not folder.is_dir():
        raise InputError("expected a folder of safetensors files", file=folder)
    index = folder / INDEX
    try:
        if index.is_file():
            names = json.loads(index.read_text())["weight_map"]
            return {key: folder / Path(file).name for key, file in names.items()}
        found: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), file)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"cannot be read as safetensors: {type(error).__name__}: {error}", file=folder) from error
    if not found:
        raise InputError("there are no safetensors files in this folder", file=folder)
    return found


def _read(saved: _Saved) -> Tensor:
    try:
        with safe_open(saved.file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(saved.key)
            return tensor
    except (OSError, SafetensorError) as error:
        raise InputError(f"'{saved.key}' cannot be read: {error}", file=saved.file) from error


def _replaced(key: str, pairs: list[tuple[str, str]]) -> str:
    for pattern, replacement in pairs:
        key, count = re.subn(pattern, replacement, key)
        if count:
            break
    return key


def _left_of(short: list[str], parts: list[str]) -> bool:
    """Whether so many parts of a name, the last among them, are left where others are taken out."""
    rest = iter(parts)
    return short[-1] == parts[-1] and all(part in rest for part in short)


def _natural(key: str) -> tuple[tuple[int, str], ...]:
    """Numbers between dots in their own order, as the library merges lists of experts."""
    return tuple(_part(part) for part in key.split("."))


def _part(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)
