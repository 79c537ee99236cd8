"""Which part of a model a parameter belongs to: a modality's, or what is shared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import Parameter

SHARED = "shared"  # the part of everything that is not one modality's alone
Parts = Mapping[str, nn.Module | Iterable[Parameter]]


@dataclass(frozen=True, slots=True)
class Tied:
    """Parameters `names` of `owner`, a module inside `modality`, which others use too."""

    owner: nn.Module
    modality: str
    names: tuple[str, ...]


def part_of_parameters(model: nn.Module, parts: Parts) -> dict[Tensor, str]:
    """The part of every parameter; one that several parts use is `SHARED`."""
    parts_of: dict[Tensor, set[str]] = {}
    for module, part in _part_of_modules(model, parts).items():
        for parameter in module._parameters.values():
            if parameter is not None:
                parts_of.setdefault(parameter, set()).add(part)
    for name, own in parts.items():
        for parameter in () if isinstance(own, nn.Module) else own:
            parts_of[parameter] = (parts_of.get(parameter, set()) - {SHARED}) | {name}
    return {parameter: next(iter(names)) if len(names) == 1 else SHARED for parameter, names in parts_of.items()}


def tied_parameters(model: nn.Module, parts: Parts) -> list[Tied]:
    """Where modalities' modules use parameters that are not theirs alone."""
    part_of = part_of_parameters(model, parts)
    tied = []
    for module, part in _part_of_modules(model, parts).items():
        names = tuple(n for n, p in module._parameters.items() if p is not None and part_of[p] != part != SHARED)
        if names:
            tied.append(Tied(module, part, names))
    return tied


def _part_of_modules(model: nn.Module, parts: Parts) -> dict[nn.Module, str]:
    """Raises ValueError where a module belongs to two parts: its parameters would have two scales."""
    part_of = dict.fromkeys(model.modules(), SHARED)
    for name, own in parts.items():
        for module in own.modules() if isinstance(own, nn.Module) else ():
            if part_of.get(module, SHARED) != SHARED:
                raise ValueError(
                    f"a {type(module).__name__} belongs to '{part_of[module]}' and to '{name}': "
                    "keep what both use outside of them"
                )
            part_of[module] = name
    return part_of
