"""The stage-cut problem of a configuration with meshes: those of its sides, joined by the tensors between them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmplan.planner.configuration import Configuration
from mmplan.planner.contract import GroupGraph
from mmplan.planner.cut_problem import CutEdge, CutProblem, Level, StageKind
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import build_problem, lag_s
from mmplan.planner.quantise import floor_ns
from mmplan.planner.sides import Side, side_groups, sides_of
from mmplan.planner.upsets import Upsets, enumerate_upsets


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshedGroups:
    """Groups of layers dealt to meshes in the order of their stages: `mesh_of` each, and of each mesh its own groups
    with their places among all. `upsets`: those in which a mesh's groups follow all of later ones."""

    groups: GroupGraph
    mesh_of: tuple[int, ...]
    parts: tuple[tuple[GroupGraph, tuple[int, ...]], ...]
    upsets: Upsets


def meshed_groups(groups: GroupGraph, apart: Sequence[tuple[str, ...]]) -> MeshedGroups | None:
    """The modules of each mesh of its own, then all others; None where a group or an edge back joins unlike meshes, or
    where there are too many upsets."""
    owner = {name: index for index, modules in enumerate(apart) for name in modules}
    mesh_of = []
    for layers in groups.groups:
        meshes = {owner.get(layer.rpartition(".")[0], len(apart)) for layer in layers}
        if len(meshes) > 1:
            return None
        mesh_of.append(meshes.pop())
    if any(mesh_of[u] > mesh_of[v] for u, v in groups.ends):
        return None
    upsets = enumerate_upsets(len(mesh_of), groups.pairs, mesh_of=mesh_of)
    if upsets is None or set(mesh_of) != set(range(len(apart) + 1)):
        return None
    parts = tuple(side_groups(groups, mesh_of, mesh) for mesh in range(len(apart) + 1))
    return MeshedGroups(groups=groups, mesh_of=tuple(mesh_of), parts=parts, upsets=upsets)


def meshed_problem(prices: Prices, meshed: MeshedGroups, configuration: Configuration) -> CutProblem:
    """The integers of one configuration, whose meshes are those of `meshed`. See `build_problem`."""
    sides = sides_of(prices, configuration)
    problems = [
        build_problem(side.prices, groups, side.configuration)
        for side, (groups, _) in zip(sides, meshed.parts, strict=True)
    ]
    places = [kept for _, kept in meshed.parts]
    count = len(meshed.mesh_of)

    def joined(name: str) -> tuple[int, ...]:
        """A per-group quantity of all sides."""
        values = [0] * count
        for problem, kept in zip(problems, places, strict=True):
            for place, value in zip(kept, getattr(problem, name), strict=True):
                values[place] = value
        return tuple(values)

    work_ns, kept_bytes, state_bytes = (joined(name) for name in ("work_ns", "kept_bytes", "state_bytes"))
    levels: list[Level] = []
    kinds: list[StageKind] = []
    kind_of: list[int] = []
    for mesh, (problem, kept) in enumerate(zip(problems, places, strict=True)):
        first, begin = len(levels), len(kinds)
        levels += [
            replace(
                level,
                work_ns=_over(work_ns, kept, level.work_ns),
                kept_bytes=_over(kept_bytes, kept, level.kept_bytes),
                state_bytes=_over(state_bytes, kept, level.state_bytes or problem.state_bytes),
            )
            for level in problem.choices
        ]
        own = problem.kinds or (problem.kind(0),)
        kinds += [
            replace(
                kind,
                levels=tuple(first + level for level in kind.levels),
                finish_ns=_over((0,) * count, kept, kind.finish_ns),
                mesh=mesh,
            )
            for kind in own
        ]
        kind_of += [begin + (problem.kind_of[stage] if problem.kinds else 0) for stage in range(problem.stages)]
    return CutProblem(
        levels=tuple(levels),
        kinds=tuple(kinds),
        kind_of=tuple(kind_of),
        mesh_of=meshed.mesh_of,
        work_ns=work_ns,
        kept_bytes=kept_bytes,
        state_bytes=state_bytes,
        finish_ns=joined("finish_ns"),
        trainable=tuple(map(bool, joined("trainable"))),
        edges=(*_inner_edges(problems, places), *_outer_edges(prices, meshed, configuration, sides)),
        ties=tuple(
            replace(tie, table=kept[tie.table], head=kept[tie.head])
            for problem, kept in zip(problems, places, strict=True)
            for tie in problem.ties
        ),
        finish_fixed_ns=min(problem.finish_fixed_ns for problem in problems),
        capacity_bytes=max(problem.capacity_bytes for problem in problems),
        stages=configuration.pp,
        microbatches=configuration.microbatches,
        schedule=configuration.schedule,
    )


def _over(values: tuple[int, ...], places: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...]:
    """The values with those of one side in their places."""
    found = list(values)
    for place, value in zip(places, own, strict=True):
        found[place] = value
    return tuple(found)


def _inner_edges(problems: Sequence[CutProblem], places: Sequence[tuple[int, ...]]) -> list[CutEdge]:
    return [
        CutEdge(producer=kept[edge.producer], consumer=kept[edge.consumer], lag_ns=edge.lag_ns)
        for problem, kept in zip(problems, places, strict=True)
        for edge in problem.edges
    ]


def _outer_edges(
    prices: Prices, meshed: MeshedGroups, configuration: Configuration, sides: Sequence[Side]
) -> list[CutEdge]:
    """The largest lag of each pair of groups of unlike meshes."""
    lag_ns: dict[tuple[int, int], int] = {}
    for edge, (producer, consumer) in zip(meshed.groups.edges, meshed.groups.ends, strict=True):
        source, target = meshed.mesh_of[producer], meshed.mesh_of[consumer]
        if source != target:
            way_s = lag_s(prices, configuration, edge, sides[source].mesh, sides[target].mesh)
            lag_ns[producer, consumer] = max(floor_ns(way_s), lag_ns.get((producer, consumer), 0))
    return [CutEdge(producer=u, consumer=v, lag_ns=ns) for (u, v), ns in sorted(lag_ns.items())]
