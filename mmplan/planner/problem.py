"""The stage-cut problem of one configuration: layer prices summed over groups, in whole nanoseconds and bytes.

What is affine stays affine: the end of a step is bounded from below by a fixed part per stage that trains anything and
a part per parameter, which is exact for the analytic cost model up to the launch time of one operator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from mmplan.cost_models.graph import Edge
from mmplan.cost_models.layout import RECOMPUTE_LEVELS, Layout, RecomputeLevel, Trained, base_of
from mmplan.errors import InputError
from mmplan.planner.border import Way, ways_s
from mmplan.planner.configuration import Configuration, replicas_per_node
from mmplan.planner.contract import GroupGraph
from mmplan.planner.cut_problem import CutEdge, CutProblem, Level, StageKind
from mmplan.planner.mesh import Mesh
from mmplan.planner.pricing import Counts, Prices, way_s
from mmplan.planner.quantise import floor_bytes, floor_ns, floors_ns, seconds
from mmplan.planner.tied_cut import copied, cut_ties, tied_matrices, tied_s
from mmplan.scenario.cluster import Cluster
from mmplan.scenario.scenario import Scenario
from mmplan.units import format_bytes

LARGEST = 2**60  # nanoseconds (36 years) or bytes: sums of a few of them stay below 2**63
SECONDS_PER_YEAR = 365 * 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What every rank can count on, in a cluster of possibly unlike pools."""

    capacity_bytes: int  # of a device, less the headroom
    reserved_bytes: int


def machine_of(scenario: Scenario, among: tuple[int, ...] = ()) -> Machine:
    """The least of some pools of the cluster, or of all."""
    headroom = scenario.constraints.memory_headroom
    pools = [pool for index, pool in enumerate(scenario.cluster.pools) if not among or index in among]
    return Machine(
        capacity_bytes=min(floor_bytes(pool.device.memory_bytes * (1 - headroom)) for pool in pools),
        reserved_bytes=max(pool.device.reserved_bytes for pool in pools),
    )


def room_bytes_of(scenario: Scenario) -> int:
    """Most that states and activations can have on any device."""
    machines = [machine_of(scenario, (pool,)) for pool in range(len(scenario.cluster.pools))]
    return max(machine.capacity_bytes - machine.reserved_bytes for machine in machines)


def devices_per_node(cluster: Cluster) -> int:
    return min(pool.devices_per_node for pool in cluster.pools)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishPrice:
    """Seconds at the end of a step: at least fixed_s + the sum of per_*_s * trained parameters of the stage's rank."""

    fixed_s: float
    per_dense_s: float
    per_spread_s: float
    per_expert_s: float
    per_kept_s: float = 0.0  # more, for dense ones that are not compressed beside others that are

    def of(self, trained: Trained) -> float:
        """The part that grows with the parameters."""
        spread_s, expert_s = trained.spread * self.per_spread_s, trained.experts * self.per_expert_s
        return trained.dense * self.per_dense_s + trained.kept * self.per_kept_s + spread_s + expert_s


def stage_finish_s(
    prices: Prices, configuration: Configuration, layers: Sequence[str], layout: Layout, trained: Trained
) -> float:
    """`finish_s` of a stage with these layers, and what it hands to others that hold a matrix of its own.

    Args:
        trained: parameters of the layers, without copies of other stages' tables.
    """
    trained = sum((one.copy for one in copied(prices, layout, layers)), trained)
    near = one_node(configuration, prices.scenario.cluster)
    return finish_s(prices, configuration, trained, layout.pools) + tied_s(prices, configuration, layers, near)


def finish_s(
    prices: Prices, configuration: Configuration, trained: Trained, pools: tuple[int, ...] | None = None
) -> float:
    """Gradient reduction over the ranks with the same weights, and update, of a rank with these parameters; where pools
    differ and none are given, on the quickest one."""
    if trained.total == 0:
        return 0.0
    count, costs = len(prices.scenario.cluster.pools), prices.costs
    near = replicas_per_node(configuration, prices.scenario.cluster)
    ways = [(pool,) for pool in range(count)] if pools is None else [pools]
    layouts = [replace(configuration.layout, pools=way) if count > 1 else configuration.layout for way in ways]
    return min(costs.reduce_s(trained, layout, near) + costs.update_s(trained, layout) for layout in layouts)


def finish_price(prices: Prices, configuration: Configuration, pools: tuple[int, ...] | None = None) -> FinishPrice:
    """An affine lower bound of `finish_s` over every size a stage can have.

    Of spread modules and experts, and of dense parameters beside compressed ones: the reduction is concave in their
    number, so that its secant from nothing to all of them lies below; the update grows no slower than between all of
    them and twice as many.
    """
    priced = prices.of_kinds(configuration.layout, configuration.microbatch_size)
    counts = np.bincount(list(prices.kind_of.values())).tolist()
    total = sum((price.trained.times(count) for price, count in zip(priced, counts, strict=True)), Trained())
    if configuration.pp == 1 and not configuration.world:  # one stage, which holds everything and no copies
        all_s = finish_s(prices, configuration, total, pools)
        return FinishPrice(fixed_s=all_s, per_dense_s=0.0, per_spread_s=0.0, per_expert_s=0.0)
    total = sum((one.copy for one in tied_matrices(prices, configuration.layout)), total)
    sizes = sorted({price.trained.dense for price in priced if price.trained.dense})

    def ends_s(trained: Trained) -> float:
        return finish_s(prices, configuration, trained, pools)

    cluster_pools = [(pool,) for pool in range(len(prices.scenario.cluster.pools))]
    ways = [replace(configuration.layout, pools=way) for way in (cluster_pools if pools is None else [pools])]
    spread, experts = Trained(spread=total.spread), Trained(experts=total.experts)
    whole = total.kept if prices.scenario.technique.compression != "none" else 0
    kept = Trained(dense=whole, kept=whole)
    several = total.spread > 0 or total.experts > 0
    beside = several and not whole and len(ways) == 1
    grown_s = _growth_s(prices, ways[0], Trained(dense=total.dense))

    def dense_s(size: int) -> float:
        """Beside others the update counts as it grows: the launch of one operator is for all of them."""
        alone_s, update_s = ends_s(Trained(dense=size)), prices.costs.update_s(Trained(dense=size), ways[0])
        return alone_s - update_s + size * grown_s if beside else alone_s

    dense = affine_below(dense_s, [*sizes, total.dense // 2 + 1, total.dense])
    return FinishPrice(
        fixed_s=dense[0] if not whole and (beside or not several) else 0.0,
        per_dense_s=dense[1],
        per_spread_s=_per_parameter(prices, ends_s(spread), ways, spread),
        per_expert_s=_per_parameter(prices, ends_s(experts), ways, experts),
        per_kept_s=max(0.0, _per_parameter(prices, ends_s(kept), ways, kept) - dense[1]),
    )


def _growth_s(prices: Prices, layout: Layout, trained: Trained) -> float:
    """By how much an update grows with each parameter, at least."""
    if trained.total == 0:
        return 0.0
    once_s = prices.costs.update_s(trained, layout)
    return (prices.costs.update_s(trained + trained, layout) - once_s) / trained.total


def _per_parameter(prices: Prices, all_s: float, ways: Sequence[Layout], trained: Trained) -> float:
    """Of parameters whose end of step takes `all_s` if one stage holds them all, in one of these ways."""
    if trained.total == 0:
        return 0.0
    updates = [prices.costs.update_s(trained, way) for way in ways]
    grown_s = min(_growth_s(prices, way, trained) for way in ways)
    return max(0.0, (all_s - max(updates)) / trained.total + grown_s)


def affine_below(function: Callable[[int], float], sizes: Sequence[int]) -> tuple[float, float]:
    """(fixed, slope): the secant of the two largest sizes, lowered until it is below the function at all of them."""
    if sizes[-1] == 0:
        return 0.0, 0.0
    values = [function(size) for size in sizes]
    if sizes[-1] == sizes[-2]:
        return 0.0, min(v / s for v, s in zip(values, sizes, strict=True))
    slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
    fixed = min(value - slope * size for value, size in zip(values, sizes, strict=True))
    if fixed >= 0:
        return fixed, slope
    return 0.0, min(v / s for v, s in zip(values, sizes, strict=True))


def build_problem(
    prices: Prices, groups: GroupGraph, configuration: Configuration, *, anywhere: bool = False
) -> CutProblem:
    """The integers of one configuration; times rounded down, bytes up, capacity down.

    Of several chunks per rank the stages of the problem are the ranks, which hold at least what 1F1B would.

    Args:
        anywhere: each stage may lie in any pool: a relaxation that is alike for all numbers of stages and replicas.

    Raises:
        InputError: a step or its memory is beyond what 64-bit integers count.
    """
    cluster, size, ranks = prices.scenario.cluster, configuration.microbatch_size, configuration.layout
    member = prices.members(groups)
    pools_of = [configuration.layout_of(stage, cluster).pools for stage in range(configuration.pp)]
    if anywhere:
        pools_of = [(pool,) for pool in range(len(cluster.pools))]
    levels: list[Level] = []
    kinds: dict[tuple[int, ...], StageKind] = {}
    copies_ns: list[tuple[int, ...]] = []
    for pools in sorted(set(pools_of)):
        names = allowed_levels(prices.scenario)
        for name in names:
            layout = replace(ranks, recompute=name, pools=pools)
            levels.append(_level(prices, member, layout, size, alone=configuration.pp == 1))
        machine = machine_of(prices.scenario, pools)
        ends = finish_parts(prices, groups, configuration, pools)
        copies_ns.append(ends.copies_ns)
        kinds[pools] = StageKind(
            levels=tuple(range(len(levels) - len(names), len(levels))),
            capacity_bytes=floor_bytes(machine.capacity_bytes - machine.reserved_bytes),
            finish_ns=ends.finish_ns,
            finish_fixed_ns=ends.fixed_ns,
        )
    order = list(kinds)
    problem = CutProblem(
        levels=tuple(levels),
        work_ns=least_of([level.work_ns for level in levels]),
        kept_bytes=least_of([level.kept_bytes for level in levels]),
        state_bytes=least_of([level.state_bytes for level in levels]),
        finish_ns=least_of([kind.finish_ns for kind in kinds.values()]),
        trainable=ends.trainable,
        edges=_cut_edges(prices, groups, configuration),
        finish_fixed_ns=min(kind.finish_fixed_ns for kind in kinds.values()),
        capacity_bytes=max(kind.capacity_bytes for kind in kinds.values()),
        kinds=tuple(kinds.values()) if len(kinds) > 1 and not anywhere else (),
        kind_of=tuple(map(order.index, pools_of)) if len(kinds) > 1 and not anywhere else (),
        stages=configuration.pp,
        microbatches=configuration.microbatches,
        schedule=configuration.schedule if configuration.vp == 1 else "1f1b",
        ties=cut_ties(prices, groups, configuration, least_of(copies_ns), one_node(configuration, cluster)),
        encoded=_encoded(prices, member, configuration),
        batch_factor=configuration.batch_factor,
    )
    _refuse_uncountable(problem, configuration.vp, prices.scenario)
    return problem


def _encoded(prices: Prices, member: Counts, configuration: Configuration) -> tuple[bool, ...]:
    """[group] whether it has layers that run several microbatches at once."""
    together = [layer.module in configuration.together for layer in prices.kinds]
    return tuple((member[:, together].sum(axis=1) > 0).tolist()) if any(together) else ()


def _level(prices: Prices, member: Counts, layout: Layout, size: int, *, alone: bool) -> Level:
    """`alone`: no stage waits for layers that run several microbatches at once."""
    priced = prices.of_kinds(layout, size)
    level = Level(
        name=layout.recompute,
        work_ns=_floors_ns(member, [price.work_s for price in priced]),
        kept_bytes=_sums(member, [price.kept_bytes for price in priced]),
        working_bytes=prices.working_bytes(layout, size),
        state_bytes=_sums(member, [price.state_bytes for price in priced]),
    )
    if layout.batch_factor == 1:
        return level
    path_s = [price.work_s * (1 if alone else price.together) for price in priced]
    encoded = [price.kept_bytes if price.together > 1 else 0 for price in priced]
    return replace(level, path_ns=_floors_ns(member, path_s), encoded_bytes=_sums(member, encoded))


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishParts:
    """The end of a step by group, see `CutProblem`; `copies_ns`: of each tied matrix."""

    finish_ns: tuple[int, ...]
    copies_ns: tuple[int, ...]
    trainable: tuple[bool, ...]
    fixed_ns: int


def finish_parts(
    prices: Prices, groups: GroupGraph, configuration: Configuration, pools: tuple[int, ...] | None = None
) -> FinishParts:
    """What each group adds to the end of a step, on these pools or the quickest."""
    price, member = finish_price(prices, configuration, pools), prices.members(groups)
    trained = [one.trained for one in prices.of_kinds(configuration.layout, configuration.microbatch_size)]
    trains = [count.total > 0 or kind.trainable for count, kind in zip(trained, prices.kinds, strict=True)]
    trainable = member @ np.array(trains) > 0
    # the fixed part is that of dense parameters; a tied head alone has a copy of them
    dense = [one and (count.dense > 0 or count.total == 0) for one, count in zip(trains, trained, strict=True)]
    alone = configuration.pp == 1 or not any(count.spread or count.experts for count in trained)
    everywhere = alone or bool((trainable <= (member @ np.array(dense) > 0)).all())
    return FinishParts(
        finish_ns=_floors_ns(member, [price.of(count) for count in trained]),
        copies_ns=tuple(floor_ns(price.of(one.copy)) for one in tied_matrices(prices, configuration.layout)),
        trainable=tuple(trainable.tolist()),
        fixed_ns=floor_ns(price.fixed_s) if everywhere else 0,
    )


def _floors_ns(member: Counts, seconds_of_kind: Sequence[float]) -> tuple[int, ...]:
    """Sums of each group in whole nanoseconds."""
    return floors_ns(member @ np.array(seconds_of_kind))


def _sums(member: Counts, bytes_of_kind: Sequence[int]) -> tuple[int, ...]:
    """Sums of each group."""
    return tuple((member @ np.array(bytes_of_kind, dtype=np.int64)).tolist())


def allowed_levels(scenario: Scenario) -> tuple[RecomputeLevel, ...]:
    """What a stage may recompute: what the technique says where it says anything, else what the constraints allow.

    Dropping attention alone frees memory only where a score matrix is kept, so it is not tried elsewhere.
    """
    technique, rules = scenario.technique, scenario.constraints
    if technique.recompute != "none":
        return (technique.recompute,)
    allowed = rules.recompute or ("none", "selective", "full")
    return tuple(
        level
        for level in RECOMPUTE_LEVELS
        if base_of(level) in allowed
        and (level != "selective" or technique.attention == "math" or allowed == ("selective",))
    )


def quickest_levels(scenario: Scenario) -> tuple[RecomputeLevel, ...]:
    """Those at one of which any layer takes least: to recompute less, or, where activations wait in host memory, to
    copy less."""
    levels = allowed_levels(scenario)
    return levels if scenario.technique.host_activations else levels[:1]


def least_of(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The least of each column."""
    return rows[0] if len(rows) == 1 else tuple(map(min, *rows))


def _refuse_uncountable(problem: CutProblem, chunks: int, scenario: Scenario) -> None:
    """Sums over all groups, edges and microbatches must stay whole numbers that arrays can hold."""
    slowest_ns = chunks * problem.microbatches * max(sum(level.path_ns or level.work_ns) for level in problem.choices)
    slowest_ns += sum(edge.lag_ns for edge in problem.edges) + problem.finish_fixed_ns + sum(problem.finish_ns)
    slowest_ns += sum(tie.sum_ns + tie.copy_ns for tie in problem.ties)
    if slowest_ns > LARGEST:
        message = f"a step of {scenario.name} could take {seconds(slowest_ns) / SECONDS_PER_YEAR:,.0f} years: "
        raise InputError(message + "check the sizes of the data and the rates and latencies of the cluster")
    kept_bytes = max(sum(level.kept_bytes) for level in problem.choices)
    most = max(problem.most_in_flight, *problem.held(problem.deepest, any(problem.encoded)))
    fullest_bytes = sum(problem.state_bytes) + most * kept_bytes
    if fullest_bytes > LARGEST:
        message = f"{scenario.name} could keep {format_bytes(fullest_bytes)} in one stage: "
        raise InputError(message + "check the sizes of the data and of the model")


def one_node(configuration: Configuration, cluster: Cluster) -> bool:
    """The closed form's one rule for all links of a configuration."""
    return configuration.last_rank < devices_per_node(cluster)


def lag_s(prices: Prices, configuration: Configuration, edge: Edge, source: Mesh, target: Mesh) -> float:
    """Seconds a cut tensor is on its way, its gradient included where one flows back; between unlike meshes the
    quickest way."""
    if source != target:
        return min(border_ways_s(prices, configuration, edge, source, target).values())
    near, size = one_node(configuration, prices.scenario.cluster), configuration.microbatch_size
    part = size * configuration.dp // source.dp
    layout = (configuration.side(source) if source.modules else configuration).layout
    part *= layout.batch_factor if layout.sends_together(edge) else 1
    return way_s(prices.costs, edge, prices.graph, prices.loads(part), prices.scenario, layout, near)


def border_ways_s(
    prices: Prices, configuration: Configuration, edge: Edge, source: Mesh, target: Mesh
) -> dict[Way, float]:
    """The same of each way between unlike meshes."""
    part = configuration.microbatch_size * configuration.dp // lcm(source.dp, target.dp)
    layouts = tuple(configuration.side(mesh).layout for mesh in (source, target))
    near, precision = one_node(configuration, prices.scenario.cluster), prices.scenario.precision_of(edge)
    return ways_s(prices.costs, edge, prices.loads(part), precision, (source, target), layouts, near)


def _cut_edges(prices: Prices, groups: GroupGraph, configuration: Configuration) -> tuple[CutEdge, ...]:
    """One edge per pair of groups, with the largest lag among the tensors between them."""
    near = one_node(configuration, prices.scenario.cluster)
    lags_s = prices.lags_s(groups.edges, configuration.layout, configuration.microbatch_size, near)
    lag_ns: dict[tuple[int, int], int] = {}
    for one_s, ends in zip(lags_s, groups.ends, strict=True):
        lag_ns[ends] = max(floor_ns(one_s), lag_ns.get(ends, 0))
    return tuple(CutEdge(producer=u, consumer=v, lag_ns=ns) for (u, v), ns in sorted(lag_ns.items()))
