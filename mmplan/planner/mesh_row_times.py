"""What the modules on rows of the search space take alone, whatever lies beside them: the first look at every row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout
from mmplan.planner.configurations import Configurations
from mmplan.planner.contract import GroupGraph
from mmplan.planner.first_bounds import busiest
from mmplan.planner.first_tables import alike_bases, tabulated
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import quickest_levels
from mmplan.planner.upsets import IntArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowTimes:
    """Of the modules on rows, at the quickest level in the quickest pool: [base, size, stages - 1] `busiest_s`, [base,
    size] `path_s`, and [base, size, edge] `down_s`, the heaviest path from where an edge from other modules ends."""

    sizes: IntArray
    busiest_s: Floats
    path_s: Floats
    down_s: Floats


def row_times(
    prices: Prices, groups: GroupGraph, rows: Configurations, chosen: IntArray, starts: Sequence[int]
) -> RowTimes:
    """Of the `chosen` rows.

    Args:
        prices: of the modules on rows.
        starts: groups where edges from other modules end.
    """
    sizes = np.unique(rows.microbatch_size).astype(np.int64)
    loads, costs = [prices.loads(int(size)) for size in sizes], prices.costs
    levels, pools = quickest_levels(prices.scenario), range(len(prices.scenario.cluster.pools))

    def work_s(layer: Layer, layout: Layout, size: int) -> list[float]:
        load = loads[size][layer.module]
        ways = [replace(layout, recompute=level, pools=(pool,)) for level in levels for pool in pools]
        return [min(costs.forward_s(layer, load, at) + costs.backward_s(layer, load, at) for at in ways)]

    used = np.zeros((len(rows.bases), len(sizes)), dtype=np.bool_)
    used[rows.base[chosen], np.searchsorted(sizes, rows.microbatch_size[chosen])] = True
    member = prices.members(groups).astype(np.float64)
    alike = prices.alike_at(*levels)
    of_bases = alike_bases(prices.kinds, alike, rows.bases)
    group_s = tabulated(prices.kinds, alike, of_bases, used, 1, work_s)[:, :, 0] @ member.T
    down_s = group_s.copy()
    for producer, consumer in sorted(groups.pairs, reverse=True):
        down_s[..., producer] = np.maximum(down_s[..., producer], group_s[..., producer] + down_s[..., consumer])
    return RowTimes(
        sizes=sizes,
        busiest_s=busiest(group_s, member, int(rows.pp[chosen].max(initial=1))),
        path_s=down_s.max(axis=2),
        down_s=down_s[..., list(starts)],
    )
