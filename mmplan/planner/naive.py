"""The plan one would make by hand: the longest pipeline that fits, equal numbers of layers per stage."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter

import numpy as np

from mmplan.errors import NoPlanFoundError
from mmplan.planner.configurations import Configurations, allowed_chunks, list_configurations
from mmplan.planner.contract import GroupGraph
from mmplan.planner.cut_plan import cut_stages, plan_from_cut
from mmplan.planner.plan import Plan
from mmplan.planner.priced_groups import priced_groups
from mmplan.planner.result import Considered, OptimizeResult
from mmplan.scenario.scenario import Scenario


def naive_plan(scenario: Scenario) -> Plan:
    """The plan of `naive_result`.

    Raises:
        NoPlanFoundError: no such cut fits into memory, which proves nothing.
    """
    return naive_result(scenario).plan


def naive_result(scenario: Scenario) -> OptimizeResult:
    """All devices, the longest pipeline, the smallest tensor-parallel degree and microbatch that fit; experts spread no
    wider than needed, nothing sharded or spread that need not be.

    Layers stand in topological order and every stage takes the same number of them, as near as groups allow. The plan
    has no bound.

    Raises:
        NoPlanFoundError: no such cut fits into memory, which proves nothing.
    """
    started_s = perf_counter()
    priced = priced_groups(scenario)
    prices, groups = priced.prices, priced.groups
    configurations = list_configurations(_one_each(scenario), len(groups.groups))
    for index in _by_hand(configurations):
        configuration = configurations[index]
        stages = equal_stages(groups, configuration.stages)
        built, time = cut_stages(prices, configuration, stages)
        if all(stage.memory_bytes <= stage.capacity_bytes for stage in built):
            wall_s = perf_counter() - started_s
            return OptimizeResult(
                plan=plan_from_cut(prices, configuration, stages, bound_s=0.0, status="given", wall_s=wall_s),
                configuration=configuration,
                time=time,
                bound_s=0.0,
                gap=1.0,
                status="given",
                wall_s=wall_s,
                considered=Considered(enumerated=1, out_of_memory=0, bounded_away=0, solved=1, infeasible=0),
                runner_ups=(),
                proofs=(),
            )
    raise NoPlanFoundError(f"no cut of {scenario.name} into equal layer counts fits into memory; try mmplan optimize")


def _one_each(scenario: Scenario) -> Scenario:
    """One chunk per rank, unless constraints want several."""
    rules = scenario.constraints
    if rules.vp and 1 not in rules.vp:
        return scenario
    return replace(scenario, constraints=replace(rules, vp=(1,))) if 1 in allowed_chunks(scenario) else scenario


def _by_hand(all_of: Configurations) -> list[int]:
    """Most devices first, then no context parallelism, the longest pipeline, little sharding and spreading, small
    tensor-parallel groups and microbatches."""
    spread = np.array([len(base.spread) for base in all_of.bases])[all_of.base]
    cp, ep, tp = all_of.of_bases("cp"), all_of.of_bases("ep"), all_of.of_bases("tp")
    keys = (all_of.microbatch_size, tp, spread, all_of.sharding, ep, -all_of.pp, cp, -all_of.ranks)
    order: list[int] = np.lexsort(keys).tolist()
    return order


def equal_stages(groups: GroupGraph, stages: int) -> tuple[tuple[str, ...], ...]:
    """Groups in topological order, cut where the count of layers passes each multiple of the mean.

    Every stage gets at least one group.
    """
    sizes = [len(group) for group in groups.groups]
    cuts = [_boundary(sizes, stage, stages) for stage in range(stages + 1)]
    for stage in range(1, stages):
        cuts[stage] = min(max(cuts[stage], cuts[stage - 1] + 1), len(sizes) - (stages - stage))
    return tuple(
        tuple(layer for group in groups.groups[first:last] for layer in group) for first, last in pairwise(cuts)
    )


def _boundary(sizes: Sequence[int], stage: int, stages: int) -> int:
    """The number of leading groups whose layers come nearest to stage / stages of all."""
    wanted = sum(sizes) * stage / stages
    sums = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    return min(range(len(sums)), key=lambda count: abs(sums[count] - wanted))
