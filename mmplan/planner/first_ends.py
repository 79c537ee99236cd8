"""What a step needs beside its microbatches if one stage held the model: the floor that `first_bounds` spreads over
stages."""

from collections.abc import Hashable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mmplan.cost_models.layout import Layout, Trained, trained_on_rank
from mmplan.cost_models.memory_rules import ParameterBytes, memory_rules, parameter_bytes
from mmplan.planner.configuration import divisors
from mmplan.planner.configurations import Configurations
from mmplan.planner.pricing import Prices
from mmplan.planner.upsets import IntArray
from mmplan.scenario.technique import SHARDINGS

Floats = NDArray[np.float64]


def whole_ends(prices: Prices, configurations: Configurations, counts: Floats) -> tuple[Floats, IntArray]:
    """[rows, 3] seconds at the end of a step, bytes of states, seconds per microbatch of gathers of weights and of
    scatters of gradients; and which row is whose.

    Args:
        counts: [base, 27] as in `first_bounds`.
    """
    replicas = np.array(divisors(prices.scenario.global_batch))
    codes = configurations.base.astype(np.int64) * len(SHARDINGS) + configurations.sharding
    turns = np.zeros(replicas[-1] + 1, dtype=np.int64)
    turns[replicas] = np.arange(len(replicas))
    codes = codes * len(replicas) + turns[configurations.dp]
    there = np.zeros(len(configurations.bases) * len(SHARDINGS) * len(replicas), dtype=np.bool_)
    there[codes] = True  # sorting millions of codes takes a second
    distinct, which = np.flatnonzero(there), (np.cumsum(there) - 1)[codes]
    apart = prices.scenario.technique.compression != "none"
    first: dict[Hashable, int] = {}
    alike = [  # of each base the first that ends its steps in the same way
        first.setdefault((*own, base.tp, base.expert_side, base.batch_factor, index if apart else 0), index)
        for index, (base, own) in enumerate(zip(configurations.bases, counts.tolist(), strict=True))
    ]
    known: dict[Hashable, tuple[float, float]] = {}
    ends: dict[tuple[int, int, int], tuple[float, float, float]] = {}
    table, degrees = np.empty((len(distinct), 3)), replicas.tolist()
    for row, code in enumerate(distinct.tolist()):
        rest, divisor = divmod(code, len(replicas))
        index, sharding = divmod(rest, len(SHARDINGS))
        base, dp = configurations.bases[index], degrees[divisor]
        key = (alike[index], sharding, dp * base.cp)
        if key not in ends:
            layout = replace(base, dp=dp, sharding=SHARDINGS[sharding])
            own = counts[index].tolist()
            alone_s, together_s = (_moved_s(prices, layout, own[place : place + 9]) for place in (9, 18))
            ends[key] = (
                _finish_s(prices, layout, own[:3], known),
                _state_bytes(prices, layout, own[3:9]),
                alone_s + together_s / layout.batch_factor,
            )
        table[row] = ends[key]
    return table, which


def _moved_s(prices: Prices, layout: Layout, counts: list[float]) -> float:
    """Gathers and scatters of one run of layers with so many parameters: all, with a backward, trained."""
    of = [int(count) for count in counts]
    held, again, trained = (Trained(of[first], of[first + 1], of[first + 2]) for first in (0, 3, 6))
    if held.total == 0:
        return 0.0
    costs, ways = prices.costs, in_pools(prices, layout)
    forward_s = min(costs.sharding_s(held, Trained(), way)[0] for way in ways)
    return forward_s + min(sum(costs.sharding_s(again, trained, way)) for way in ways)


def in_pools(prices: Prices, layout: Layout) -> list[Layout]:
    """The layout in each pool."""
    ways = [(pool,) for pool in range(len(prices.scenario.cluster.pools))]
    return [layout if layout.pools == pools else replace(layout, pools=pools) for pools in ways]


def _finish_s(prices: Prices, layout: Layout, counts: list[float], known: dict[Hashable, tuple[float, float]]) -> float:
    """Reductions of each kind of parameters on their own, and how the update grows with them."""
    dense, spread, experts = map(int, counts)
    parts = (
        (_dense(prices, layout, dense), (dense, layout.replicas, layout.tp)),
        (Trained(0, spread, 0), (spread, layout.replicas, layout.tp)),
        (Trained(0, 0, experts), (experts, layout.expert_replicas, layout.expert_side)),
    )
    slots = max(1, max(pool.devices_per_node for pool in prices.scenario.cluster.pools) // layout.tp)
    seconds = 0.0
    for place, (trained, ranks) in enumerate(parts):
        key = (place, layout.sharding, ranks, trained.kept)
        if trained.total and key not in known:
            near = range(1, min(slots, layout.replicas) + 1)
            costs, ways = prices.costs, in_pools(prices, layout)
            more_s = min(costs.update_s(trained + trained, way) - costs.update_s(trained, way) for way in ways)
            known[key] = min(costs.reduce_s(trained, way, one) for one in near for way in ways), more_s
        seconds += sum(known[key]) if trained.total else 0.0
    return seconds


def _dense(prices: Prices, layout: Layout, dense: int) -> Trained:
    """Of the model, with how much of it goes in how many messages where gradients are compressed."""
    if prices.scenario.technique.compression == "none":
        return Trained(dense)
    total = sum((trained_on_rank(prices.kinds[kind], layout) for kind in prices.kind_of.values()), Trained())
    return Trained(dense, kept=total.kept, messages=total.messages)


def _state_bytes(prices: Prices, layout: Layout, counts: list[float]) -> float:
    """As `state_parts`, without rounding up; where modules differ in precision each kind of bytes is the least."""
    scenario, stage = prices.scenario, SHARDINGS.index(layout.sharding)
    technique = scenario.technique
    pers = [parameter_bytes(one, scenario.optimizer, technique) for one in scenario.precisions]
    per = ParameterBytes(**{name: min(getattr(one, name) for one in pers) for name in ParameterBytes.__slots__})
    split_from = memory_rules(technique.stack).gradients_split_from
    dense, expert = layout.replicas, layout.expert_replicas
    on_device = 1 if technique.host_states != "parameters" else 0
    optimizer_bytes = per.optimizer if technique.host_states == "none" else 0
    total = 0.0
    for trained, frozen, ranks in zip(counts[:3], counts[3:], (dense, dense * layout.tp, expert), strict=True):
        weights, gradients, states = (ranks if stage >= least else 1 for least in (3, split_from, 1))
        kept_bytes = per.weight / weights + per.gradient / gradients
        total += trained * (kept_bytes * on_device + optimizer_bytes / states)
        total += frozen * per.frozen * on_device / (max(dense, ranks) if stage >= 3 else 1)
        total += 2 * trained if technique.fp8 != "none" and not any(la.no_fp8 for la in prices.kinds) else 0
    return total
