"""The units of a model: the pieces that a stage runs whole, found by structure and not by family.

Units are the members of its outermost `ModuleList`s (blocks), and outside of these the topmost modules that own
parameters themselves and hold no such list. Everything between units is glue: tensor work of the model's own forward,
which every stage that needs it repeats. Parameters that glue reads belong to the stage that needs what is made of them.
"""

from collections.abc import Iterator

from torch import nn


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> unit, in the order of the model's modules; a module that stands in two places is one unit."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, module in _walk(model, ""):
        found.setdefault(id(module), (name, module))
    return dict(found.values())


def parameter_names(model: nn.Module, piece: str) -> tuple[str, ...]:
    """Of a unit, or the parameter itself."""
    owner, _, own = piece.rpartition(".")
    if own in dict(model.get_submodule(owner).named_parameters(recurse=False)):
        return (piece,)
    return tuple(f"{piece}.{name}" for name, _ in model.get_submodule(piece).named_parameters())


def _walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, nn.ModuleList):
        yield from ((f"{name}.{key}", member) for key, member in module.named_children() if _has_parameters(member))
        return
    holds_lists = any(isinstance(part, nn.ModuleList) for part in module.modules())
    if name and not holds_lists and next(module.parameters(recurse=False), None) is not None:
        yield name, module
        return
    for key, child in module.named_children():
        yield from _walk(child, f"{name}.{key}" if name else key)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
