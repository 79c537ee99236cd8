"""Which framework has what a plan needs: the table `support.yaml`, and how ready a framework is for a plan by it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from mmplan.errors import CheckError
from mmplan.planner.formats.needs import Need

Status = Literal["native", "plug-in", "impossible"]
_SHARE: dict[Status, float] = {"native": 1.0, "plug-in": 0.5, "impossible": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A framework; `short`: its name in a narrow table; `runs`: the part of it that would run a plan; `export`: its
    exporter."""

    id: str
    short: str
    name: str
    version: str
    runs: str
    export: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Whether a framework has something: `native` by a flag or an API of its own; `plug-in` where its extension points
    take code for it; `impossible` where that contradicts what it checks or assumes. `source` shows it."""

    status: Status
    why: str
    source: str


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    table: Mapping[str, Mapping[str, Mapping[str, Any]]] = yaml.safe_load(
        (Path(__file__).parent / "support.yaml").read_text()
    )
    return table


def targets() -> tuple[Target, ...]:
    """All frameworks, in the order of the table."""
    return tuple(Target(id=name, **fields) for name, fields in _table()["targets"].items())


def target_of(name: str) -> Target:
    """The framework of that id; KeyError where there is none."""
    return next(target for target in targets() if target.id == name)


def cell(target: str, need: str) -> Cell:
    """What a framework has for a need; KeyError where the table has no such row or column."""
    status, why, source = _table()["needs"][need][target]
    return Cell(status=status, why=why, source=source)


def need_names() -> tuple[str, ...]:
    """All rows of the table."""
    return tuple(_table()["needs"])


def readiness(cells: tuple[Cell, ...]) -> float:
    """Share of the needs that a framework has, a plug-in counting half; 1: it runs the plan as it is."""
    return sum(_SHARE[one.status] for one in cells) / len(cells) if cells else 1.0


def plugged(needs: tuple[Need, ...], target: str) -> tuple[tuple[Need, Cell], ...]:
    """The needs for which a framework takes a plug-in.

    Raises:
        CheckError: something else is impossible in it.
    """
    found = [(need, cell(target, need.name)) for need in needs]
    for need, one in found:
        if one.status == "impossible":
            raise CheckError(f"{target_of(target).name} cannot run {need.name} ({need.sentence}): {one.why}")
    return tuple((need, one) for need, one in found if one.status == "plug-in")
