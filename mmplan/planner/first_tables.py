"""What the first look at all configurations is made of: prices of each kind of layer by layout and microbatch size.

Layouts that are the same to a layer are priced once. The tables can be made in two parts, of which each prices every
other layout of a kind, and whose sum is the whole.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout, trained_on_rank
from mmplan.cost_models.load import Load
from mmplan.cost_models.memory_states import layer_counts
from mmplan.cost_models.planned_memory import planned_kept_bytes
from mmplan.planner.configurations import Configurations
from mmplan.planner.first_ends import Floats, in_pools
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import allowed_levels, quickest_levels
from mmplan.planner.upsets import BoolArray, IntArray

Part = int | None  # 0 or 1; None: the whole
AlikeBases = list[tuple[Layout, IntArray]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FirstTables:
    """Each [base, size, value, kind], where a value is: of `work_s` one per pool, at the quickest level of
    recomputation, and the forward in the quickest pool; of `kept_bytes` at the quickest and at the leanest level. Of
    `counts`, which have one size, 27 as in `first_bounds`."""

    sizes: IntArray
    work_s: Floats
    kept_bytes: Floats
    counts: Floats

    def __add__(self, other: "FirstTables") -> "FirstTables":
        """Of two parts the whole: each is zero where the other is not."""
        return FirstTables(
            sizes=self.sizes,
            work_s=self.work_s + other.work_s,
            kept_bytes=self.kept_bytes + other.kept_bytes,
            counts=self.counts + other.counts,
        )


def first_tables(prices: Prices, configurations: Configurations, part: Part = None) -> FirstTables:
    """The tables of all bases and sizes that occur, or one of two parts."""
    sizes, kinds = np.unique(configurations.microbatch_size).astype(np.int64), prices.kinds
    levels, quickest = allowed_levels(prices.scenario), quickest_levels(prices.scenario)
    alike = prices.alike_at(*quickest, levels[-1])
    costs, scenario = prices.costs, prices.scenario

    def at_once(layer: Layer, layout: Layout, size: int) -> tuple[Load, int]:
        """Of how many microbatches, and the load of these."""
        count = layout.microbatches_of(layer.module)
        return prices.loads(int(sizes[size]) * count)[layer.module], count

    def work_s(layer: Layer, layout: Layout, size: int) -> list[float]:
        (load, count), found = at_once(layer, layout, size), []
        for level in quickest:
            ways = in_pools(prices, replace(layout, recompute=level))
            forward_s = [costs.forward_s(layer, load, at) / count for at in ways]
            backward_s = [costs.backward_s(layer, load, at) / count for at in ways]
            both_s = [there_s + back_s for there_s, back_s in zip(forward_s, backward_s, strict=True)]
            found.append([*both_s, min(forward_s)])
        return found[0] if len(found) == 1 else np.min(found, axis=0).tolist()

    def kept_bytes(layer: Layer, layout: Layout, size: int) -> list[float]:
        load, count = at_once(layer, layout, size)
        return [planned_kept_bytes(layer, load, scenario, layout.at(levels[end])) / count for end in (0, -1)]

    used = np.zeros((len(configurations.bases), len(sizes)), dtype=np.bool_)
    used[configurations.base, np.searchsorted(sizes, configurations.microbatch_size)] = True
    of_bases = alike_bases(kinds, alike, configurations.bases, part)
    pools = len(scenario.cluster.pools)
    return FirstTables(
        sizes=sizes,
        work_s=tabulated(kinds, alike, of_bases, used, pools + 1, work_s),
        kept_bytes=tabulated(kinds, alike, of_bases, used, 2, kept_bytes),
        counts=tabulated(kinds, prices.alike, of_bases, used[:, :1] | True, 27, _counts),
    )


def _counts(layer: Layer, layout: Layout, _: int) -> list[float]:
    trained, held = trained_on_rank(layer, layout), layer_counts(layer, layout.shard(layer))
    spread = layer.module in layout.spread
    dense = (0, held.dense) if spread else (held.dense, 0)
    frozen = (0, held.dense_frozen) if spread else (held.dense_frozen, 0)
    reduced = (trained.dense, trained.spread, trained.experts)
    every = (dense[0] + frozen[0], dense[1] + frozen[1], held.expert + held.expert_frozen)
    own = (*every, *(every if layer.has_backward else (0, 0, 0)), *reduced)
    none = (0,) * len(own)
    return [
        *reduced,
        *dense,
        held.expert,
        *frozen,
        held.expert_frozen,
        *(own if layer.module not in layout.together else none),
        *(own if layer.module in layout.together else none),
    ]


def alike_bases(
    kinds: tuple[Layer, ...], alike: Sequence[int], bases: tuple[Layout, ...], part: Part = None
) -> list[AlikeBases]:
    """[kind] the first of the layouts that are the same to a layer, and the places of all of them; of all, or of every
    other one. Nothing for kinds that are `alike` an earlier one."""
    found: list[AlikeBases] = []
    for kind, layer in enumerate(kinds):
        places: dict[Hashable, list[int]] = {}
        for index, base in enumerate(bases) if alike.index(alike[kind]) == kind else ():
            same = (base.shard(layer), base.sharing(layer), base.microbatches_of(layer.module))
            places.setdefault(same, []).append(index)
        groups = [(bases[of[0]], np.array(of)) for of in places.values()]
        found.append(groups if part is None else groups[part::2])
    return found


def tabulated(
    kinds: tuple[Layer, ...],
    alike: Sequence[int],
    of_bases: Sequence[AlikeBases],
    used: BoolArray,
    width: int,
    price: Callable[[Layer, Layout, int], list[float]],
) -> Floats:
    """[base, size, value, kind], zero where no configuration has base and size; layouts that are the same to a layer
    are priced once."""
    table = np.zeros((*used.shape, width, len(kinds)))
    for kind, layer in enumerate(kinds):
        if (first := alike.index(alike[kind])) < kind:
            table[..., kind] = table[..., first]
            continue
        for base, places in of_bases[kind]:
            with_size = used[places]
            for size in np.flatnonzero(with_size.any(axis=0)).tolist():
                table[places[with_size[:, size]], size, :, kind] = price(layer, base, size)
    return table
