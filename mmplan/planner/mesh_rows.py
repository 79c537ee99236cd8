"""Rows of the search space for modules that leave ranks to others, and where on the cluster these ranks can be."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mmplan.planner.configurations import Configurations
from mmplan.planner.upsets import IntArray
from mmplan.scenario.cluster import Cluster


def without(configurations: Configurations, names: set[str]) -> Configurations:
    """The rows of bases that differ in other things than how the modules of these names are spread, once each, without
    those of several chunks per rank."""
    bases = tuple(
        replace(
            base,
            spread=tuple(name for name in base.spread if name not in names),
            patches=tuple(name for name in base.patches if name not in names),
        )
        for base in configurations.bases
    )
    last = {base: index for index, base in enumerate(bases)}  # the most spread, whose microbatches are the largest
    apart = [index for base, index in last.items() if base.batch_factor == 1]  # meshes run each microbatch alone
    kept = np.isin(configurations.base, apart) & (configurations.vp == 1)
    return replace(taken(configurations, np.flatnonzero(kept)), bases=bases)


def taken(configurations: Configurations, rows: IntArray) -> Configurations:
    """Some rows."""
    columns = ("base", "sharding", "dp", "pp", "microbatch_size", "microbatches", "vp")
    return replace(configurations, **{name: getattr(configurations, name)[rows] for name in columns})


def first_ranks(cluster: Cluster, begin: int, sizes: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, ...]]:
    """First ranks of meshes of (tp, groups of so many in a stage, stages) behind `begin` ranks, in their order: at the
    next whole group of tp, and where pools differ also at the start of a later pool."""
    if not sizes:
        yield ()
        return
    tp, groups, stages = sizes[0]
    starts = {begin + -begin % tp}
    if len(cluster.pools) > 1:
        ends = np.cumsum([pool.device_count for pool in cluster.pools])[:-1]
        starts |= {int(end) for end in ends if end >= begin}
    for first in sorted(starts):
        end = first + tp * groups * stages
        if end <= cluster.device_count:
            for others in first_ranks(cluster, end, sizes[1:]):
                yield (first, *others)
