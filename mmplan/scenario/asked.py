"""What constraints ask of some layers, or of one module: zones, and ranks of its own."""

from dataclasses import dataclass
from typing import Literal

Forbidden = Literal["split", "tensor_sharding", "fp8", "low_precision_reduce", "compression"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Zone:
    """Layers that belong together, as a scenario names them, and what is forbidden there."""

    name: str
    layers: tuple[str, ...]
    forbid: tuple[Forbidden, ...] = ("split",)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRanks:
    """A module that has to have ranks of its own, with what follows it up to a language model, and the degrees these
    may have; empty tuples allow every value."""

    module: str
    tp: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
