"""Whose loss scale gradients carry inside a user's own model: a unit's modality's, and between units that of `shared`.

Every tensor that goes into a unit or comes out of it changes scale, so what stages send each other is in that of
`shared` whichever units made it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.ghost.holdings import Holdings
from mmplan.runtime.ghost.model import Crossing
from mmplan.runtime.ghost.recording import Recording
from mmplan.runtime.ghost.traffic import Owners
from mmplan.runtime.ghost.units import parameter_names
from mmplan.runtime.numerics.modality_parts import SHARED
from mmplan.runtime.numerics.part_scales import PartScales


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitParts:
    """units: the part of each unit that is not shared; parameters: of each, by its names."""

    units: Mapping[str, str]
    parameters: Mapping[str, str]


def parts_of(plan: Plan, held: Holdings, owners: Owners, recordings: Sequence[Recording]) -> UnitParts:
    """Raises InputError where losses are scaled and a parameter is used in two parts."""
    modality = {module.name: module.modality for module in plan.scenario.model.modules}
    called = {call.unit for recording in recordings for call in recording.calls}
    units: dict[str, str] = {
        piece: modality[layer.rsplit(".", 1)[0]] for piece, layer in owners.layer_of.items() if piece in called
    }
    glue = {id(held.model.get_parameter(name)) for recording in recordings for name in recording.glue}
    parameters: dict[str, str] = {}
    used_in: dict[int, tuple[str, str]] = {}  # by parameter: a name, and its part
    for piece in dict.fromkeys(piece for pieces in held.pieces for piece in pieces):
        for name in parameter_names(held.model, piece):
            key = id(held.model.get_parameter(name))
            own = units.get(piece, SHARED)
            first, part = used_in.setdefault(key, (name, own))
            other = "between units" if key in glue and own != SHARED else ""
            if own != part:
                other = f"in {own}, " + (f"as '{name}'" if name != first else f"by '{piece}'")
            if other and "fp16" in plan.scenario.precisions:
                raise InputError(
                    f"'{first}' is used in {part} and {other}: under loss scales of modalities its gradient would "
                    "have two; train in bf16 (`precision: bf16`)"
                )
            parameters[name] = part
    return UnitParts(units=units, parameters=parameters)


def crossing(scales: PartScales, parts: UnitParts) -> Crossing:
    """How tensors pass into units and out of them."""

    def scaled(x: Tensor, unit: str, inward: bool) -> Tensor:
        part = parts.units.get(unit, SHARED)
        if part == SHARED:
            return x
        return scales.cross(x, SHARED, part) if inward else scales.cross(x, part, SHARED)

    return scaled
