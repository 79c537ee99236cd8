"""A configuration with meshes as several jobs: the modules of each mesh, their prices and groups, and their ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.planner.configuration import Configuration
from mmplan.planner.contract import GroupGraph
from mmplan.planner.mesh import Mesh
from mmplan.planner.plan import module_of
from mmplan.planner.pricing import Prices


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """The modules of one mesh as a job of their own; `prices` know these modules only."""

    mesh: Mesh
    prices: Prices
    configuration: Configuration


def sides_of(prices: Prices, configuration: Configuration) -> tuple[Side, ...]:
    """One for each mesh and last that of all other modules; without meshes the configuration itself."""
    if not configuration.meshes:
        return (Side(mesh=configuration.mesh, prices=prices, configuration=configuration),)
    apart = {name for mesh in configuration.meshes for name in mesh.modules}
    names = (module.name for module in prices.scenario.model.modules)
    rest = frozenset(name for name in names if name not in apart)
    return tuple(
        Side(
            mesh=mesh,
            prices=prices.among(frozenset(mesh.modules) or rest),
            configuration=configuration.side(mesh),
        )
        for mesh in (*configuration.meshes, configuration.mesh)
    )


def side_index(sides: Sequence[Side], layers: Sequence[str]) -> int:
    """The side that holds a stage or group of layers."""
    modules = {module_of(layer) for layer in layers}
    return next((index for index, side in enumerate(sides) if modules & set(side.mesh.modules)), len(sides) - 1)


def side_groups(groups: GroupGraph, mesh_of: Sequence[int], mesh: int) -> tuple[GroupGraph, tuple[int, ...]]:
    """The groups of one mesh, and the place of each among all."""
    kept = tuple(index for index, other in enumerate(mesh_of) if other == mesh)
    turn = {index: place for place, index in enumerate(kept)}
    inside = [place for place, (u, v) in enumerate(groups.ends) if u in turn and v in turn]
    return GroupGraph(
        groups=tuple(groups.groups[index] for index in kept),
        edges=tuple(groups.edges[place] for place in inside),
        ends=tuple((turn[groups.ends[place][0]], turn[groups.ends[place][1]]) for place in inside),
    ), kept
