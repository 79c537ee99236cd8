"""The mesh of a JAX program: axes over which both the layers and the experts of a plan are split.

A stage's ranks are numbered replica first, then cp, then tp; its experts lie over the same ranks, those of one expert
first (see `Plan`). Both are products of the same axes when each boundary of one divides the next of the other; an axis
that both cut is cut into two.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import prod

from mmplan.errors import CheckError
from mmplan.planner.plan import Plan

Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshAxes:
    """`sizes`: axes with their sizes, the slowest first. The other fields: which axes make up a degree."""

    sizes: tuple[tuple[str, int], ...]
    dp: Axes
    cp: Axes
    tp: Axes
    expert_replicas: Axes
    ep: Axes
    etp: Axes

    def size(self, axes: Axes) -> int:
        return prod(size for name, size in self.sizes if name in axes)


def mesh_axes(plan: Plan) -> MeshAxes:
    """The axes of a stage's ranks.

    Raises:
        CheckError: experts and layers are split over groups of ranks that no one mesh has.
    """
    ranks, etp = plan.dp * plan.width, plan.ranks_per_expert
    dense, experts = (1, plan.tp, plan.width, ranks), (1, etp, etp * plan.ep, ranks)
    bounds = sorted({*dense, *experts})
    for low, high in pairwise(bounds):
        if high % low:
            raise CheckError(
                f"JAX: experts lie on groups of ep={plan.ep} x etp={etp} = {etp * plan.ep} ranks, layers on groups of "
                f"tp={plan.tp} x cp={plan.cp} = {plan.width}; {high} is no multiple of {low}, so no one mesh has both"
            )
    spans = list(pairwise(bounds)) or [(1, 1)]
    names = _names(spans, dense)
    axes = [(name, high // low) for name, (low, high) in zip(names, spans, strict=True)]

    def between(low: int, high: int) -> Axes:
        inside = [n for n, (first, last) in zip(names, spans, strict=True) if low <= first < last <= high]
        return tuple(reversed(inside))

    return MeshAxes(
        sizes=tuple(reversed(axes)),
        tp=between(1, dense[1]),
        cp=between(dense[1], dense[2]),
        dp=between(dense[2], dense[3]),
        etp=between(1, experts[1]),
        ep=between(experts[1], experts[2]),
        expert_replicas=between(experts[2], experts[3]),
    )


def _names(spans: list[tuple[int, int]], dense: tuple[int, int, int, int]) -> list[str]:
    """`dp`, `cp`, `tp`; `dp0`, `dp1` where one is cut, the faster first."""
    owners = [
        next(name for name, end in zip(("tp", "cp", "dp"), dense[1:], strict=True) if high <= end or name == "dp")
        for _, high in spans
    ]
    return [
        owner if owners.count(owner) == 1 else f"{owner}{owners[:place].count(owner)}"
        for place, owner in enumerate(owners)
    ]
