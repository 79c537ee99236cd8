"""Where encoders stand side by side, upsets multiply: their layers are merged until the dynamic program can list them.

Groups of the tail stay as they are, they only add upsets. Every cut of merged groups is a cut of the layers; that it is
the best one does not follow, so it is improved by `refined`: one branch at a time in full, the others only where they
are cut. What is proven comes from the bound, or from CP-SAT.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import ceil

from mmplan.cost_models.layout import Layout
from mmplan.errors import InputError
from mmplan.planner.configuration import Configuration
from mmplan.planner.contract import GroupGraph, merge_chains
from mmplan.planner.priced_groups import PricedGroups
from mmplan.planner.problem import build_problem
from mmplan.planner.stage_dp import cut_by_dp
from mmplan.planner.stage_order import chains, tail_start
from mmplan.planner.upsets import Upsets, enumerate_upsets

# 1,500 upsets are 1 M pairs: a run of the dynamic program takes some 0.3 s.
COARSE_UPSETS = 1500
# Weights of a piece tried, relative to the heaviest branch: each step down lets the upsets of two branches double.
STEPS = 24
# Distances from a cut at which a branch may be cut instead, tried until the upsets can be listed.
REACHES = (64, 16, 8, 4, 2, 1)
MOST_ROUNDS = 4
ROUND_ROWS = 1_000_000  # label extensions of one run, some 0.5 s


@dataclass(frozen=True, kw_only=True, slots=True)
class Coarse:
    """Merged groups, their upsets, and the branches (chains in front of the tail) they were merged in."""

    groups: GroupGraph
    upsets: Upsets
    chains: tuple[tuple[int, ...], ...]
    branches: tuple[int, ...]  # indices into `chains`


def coarse_enough(priced: PricedGroups) -> Coarse:
    """The groups themselves where their upsets can be listed, else branches cut into pieces of about equal work.

    Raises:
        InputError: there are too many branches for that.
    """
    groups = priced.groups
    count, pairs = len(groups.groups), groups.pairs
    rows = chains(count, pairs)
    start = tail_start(count, pairs)
    branches = tuple(index for index, row in enumerate(rows) if row[-1] < start)
    upsets = enumerate_upsets(count, pairs)
    if upsets is not None:
        return Coarse(groups=groups, upsets=upsets, chains=rows, branches=branches)
    layers = priced.prices.layers(Layout(), 1)
    weights = [sum(layers[x].work_s for x in members) for members in groups.groups]
    heaviest = max(sum(weights[group] for group in rows[index]) for index in branches)
    best: Coarse | None = None
    for step in range(STEPS):
        piece = heaviest / 2 ** (step / 2)
        kept = [
            _even_places([weights[group] for group in row], piece) if index in branches else range(len(row))
            for index, row in enumerate(rows)
        ]
        merged = merge_chains(priced.prices.graph, groups, rows, kept)
        upsets = enumerate_upsets(len(merged.groups), merged.pairs, COARSE_UPSETS)
        if upsets is None and best is not None:
            break
        if upsets is None:
            continue
        best = Coarse(groups=merged, upsets=upsets, chains=rows, branches=branches)
    if best is None:
        raise InputError(
            f"the model has {len(branches)} rows of layers side by side, whose ends can be combined in more than "
            f"{COARSE_UPSETS:,} ways however few pieces each is cut into: join some of these modules"
        )
    return best


def _even_places(weights: list[float], piece: float) -> set[int]:
    """Positions that cut a row into pieces of at most about this weight."""
    total = sum(weights)
    pieces = min(len(weights), max(1, ceil(total / piece)))
    places: set[int] = set()
    sums = 0.0
    for place, weight in enumerate(weights[:-1], start=1):
        sums += weight
        if sums >= (len(places) + 1) * total / pieces:
            places.add(place)
    return places


def refined(
    priced: PricedGroups,
    coarse: Coarse,
    configuration: Configuration,
    stage_of: tuple[int, ...],
    objective_ns: int,
    *,
    enough_ns: int,
    busiest_ns: int,
    stop: Callable[[], bool],
) -> tuple[tuple[int, ...], int]:
    """A cut of the finest groups that is no slower: stage of each group, and its objective.

    Args:
        stage_of, objective_ns: a cut of the finest groups.
        enough_ns: not worth improving any more.
    """
    for _ in range(MOST_ROUNDS):
        before_ns = objective_ns
        for branch in coarse.branches:
            if objective_ns <= enough_ns or stop():
                return stage_of, objective_ns
            found = _neighbourhood(priced, coarse, stage_of, branch)
            if found is None:
                continue
            groups, upsets = found
            problem = build_problem(priced.prices, groups, configuration)
            result = cut_by_dp(
                problem, upsets, cutoff_ns=objective_ns, busiest_ns=busiest_ns, max_rows=ROUND_ROWS, stop=stop
            )
            if result.stage_of is not None and result.objective_ns is not None:
                stage_of = spread(priced.groups, groups, result.stage_of)
                objective_ns = result.objective_ns
        if objective_ns == before_ns:
            break
    return stage_of, objective_ns


def spread(groups: GroupGraph, merged: GroupGraph, stage_of: tuple[int, ...]) -> tuple[int, ...]:
    """The stages of `groups` in a cut of the merged ones."""
    of_layer = {layer: stage for members, stage in zip(merged.groups, stage_of, strict=True) for layer in members}
    return tuple(of_layer[members[0]] for members in groups.groups)


def _neighbourhood(
    priced: PricedGroups, coarse: Coarse, stage_of: tuple[int, ...], branch: int
) -> tuple[GroupGraph, Upsets] | None:
    """Groups that leave the tail and one branch free near its cuts, and the other branches to be cut where they are."""
    cuts = [
        {place for place in range(1, len(row)) if stage_of[row[place]] != stage_of[row[place - 1]]}
        for row in coarse.chains
    ]
    for reach in REACHES:
        kept: list[Collection[int]] = [
            range(len(row)) if index not in coarse.branches else cuts[index] for index, row in enumerate(coarse.chains)
        ]
        near = cuts[branch] or {len(coarse.chains[branch]) // 2}
        kept[branch] = {
            place for place in range(1, len(coarse.chains[branch])) if min(abs(place - cut) for cut in near) <= reach
        }
        merged = merge_chains(priced.prices.graph, priced.groups, coarse.chains, kept)
        upsets = enumerate_upsets(len(merged.groups), merged.pairs, COARSE_UPSETS)
        if upsets is not None:
            return merged, upsets
    return None
