"""Lower bounds of all configurations at once from a few numbers each: which of millions are worth a closer look.

As in `bounds`, but every term comes from sums over the model, so that a row costs some hundred nanoseconds:

    (m - 1) * max(mean work, k equal groups) + heaviest path + least lags + mean finish

or, with v chunks on each of p ranks, (v m + p - 1) * max(mean work of a chunk, k equal groups) + least lags + mean
finish; where devices differ, work is that of the quickest and the mean counts a stage by how much of it its devices do;
and a row is out where states and activations, spread evenly over all stages, exceed the memory of these.

Where the model is one chain, the stage that is j-th from the end holds min(m, j) microbatches, so all stages together
keep at most so much of one microbatch, states in the deepest stages first; what does not fit has to be recomputed, at
the least seconds per byte that any block offers. Where ranks have several chunks, one level of recomputation holds for
all layers: the lightest that fits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from mmplan.cost_models.layout import Layout
from mmplan.planner.configurations import Column, Configurations
from mmplan.planner.contract import GroupGraph
from mmplan.planner.first_ends import Floats, whole_ends
from mmplan.planner.first_tables import FirstTables, first_tables
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import allowed_levels, quickest_levels, room_bytes_of
from mmplan.planner.stage_order import tail_start
from mmplan.planner.stopping import Stopped, never
from mmplan.planner.upsets import BoolArray, IntArray
from mmplan.scenario.cluster import Cluster
from mmplan.scenario.schedule_names import ScheduleName

NEVER = 2**62
# Sums of doubles in another order: far more than their error, far less than what bounds differ by.
SAFE = 1 - 1e-9
CHUNK_ROWS = 32_768  # a block's arrays stay in the processor's caches


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstBounds:
    """Per configuration: no step is shorter than `step_ns`, NEVER where nothing can fit; with any memory `roomy_ns`;
    under any schedule and with any number of chunks per rank `any_order_ns`. Each stage needs at least `need_bytes`
    beside its reserve, if all need the same. `parts`: what they were made of."""

    step_ns: IntArray
    roomy_ns: IntArray
    any_order_ns: IntArray
    need_bytes: Floats
    parts: "FirstParts"


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstParts:
    """[base, size, kind] work at the quickest level, `forward_s` of it the forward, bytes kept at the quickest and at
    the leanest level; [level, kind] `further`: what a level recomputes that the quickest does not; [base, size]
    `lag_s`; [row] `which` of `ends`, see `whole_ends`. `unknown`: so that all levels count with the leanest bytes."""

    sizes: IntArray
    kind_s: Floats
    forward_s: Floats
    unrecomputed_bytes: Floats
    kept_bytes: Floats
    further: BoolArray
    unknown: bool
    lag_s: Floats
    ends: Floats
    which: IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """Sums over the model. [base, size]: `total_s`, `path_s`, `lag_s`, `kept_bytes` at the leanest level of
    recomputation and `unrecomputed_bytes` at the quickest, `saving_s_per_byte` at least for the difference. [base,
    size, stages - 1]: `busiest_s`. [base, size, pool] `pace`: by how much longer than the quickest pool each one works
    at least. [level, base, size] `levels_s`, `levels_bytes`: work and kept bytes at least where all layers recompute at
    one level. [base, 27] `counts`: trained parameters of a rank, these with tied ones, frozen ones; then all,
    those in layers that have a backward, and the trained ones, first of layers that run each microbatch alone, then of
    those that run several at once: each dense, spread and of experts. The rest as in `FirstParts`."""

    sizes: IntArray
    path_s: Floats
    lag_s: Floats
    kept_bytes: Floats
    busiest_s: Floats
    total_s: Floats
    pace: Floats
    counts: Floats
    in_a_row: bool
    unrecomputed_bytes: Floats
    saving_s_per_byte: Floats
    levels_s: Floats
    levels_bytes: Floats
    kind_s: Floats
    forward_s: Floats
    of_kinds_bytes: tuple[Floats, Floats]
    further: BoolArray
    unknown: bool


def first_bounds(
    prices: Prices,
    groups: GroupGraph,
    configurations: Configurations,
    tables: FirstTables | None = None,
    stop: Callable[[], bool] = never,
) -> FirstBounds:
    """Bounds of all rows; `tables` where they are known.

    Raises:
        Stopped: `stop` said so first.
    """
    model = _model(prices, groups, configurations, tables or first_tables(prices, configurations))
    ends, which = whole_ends(prices, configurations, model.counts)
    room_bytes = room_bytes_of(prices.scenario)
    size_of = np.searchsorted(model.sizes, configurations.microbatch_size)
    count = len(configurations)
    step_ns, roomy_ns, any_order_ns = (np.empty(count, np.int64) for _ in range(3))
    need_bytes = np.empty(count)
    for rows in _blocks(count, stop):
        base, size, pp = configurations.base[rows], size_of[rows], configurations.pp[rows]
        m, vp = configurations.microbatches[rows], configurations.vp[rows]
        pieces, one = pp * vp, vp == 1
        finish_s, state_bytes, moved_s = ends[which[rows]].T
        once_s = model.path_s[base, size] * one + (pieces - 1) * model.lag_s[base, size] + finish_s / pp
        busiest_s = model.busiest_s[base, size, pieces - 1]
        beside_s, again_s = model.total_s[base, size], np.zeros(len(pp))
        # a rank with the mean of all work, or with its share of equal groups, works so long in any order
        shared_s = np.maximum(moved_s, beside_s) + prices.costs.serial_share * np.minimum(moved_s, beside_s)
        any_s = np.maximum((m * shared_s + finish_s) / pp, m * model.busiest_s[base, size, pp - 1])
        fits = np.ones(len(pp), dtype=np.bool_)
        if model.in_a_row:
            most_bytes = _most_kept(configurations.schedule, room_bytes, state_bytes, pp, m)
            most_bytes = np.where(one, most_bytes, _most_in_chunks(room_bytes, state_bytes, pp)) / SAFE
            fits = model.kept_bytes[base, size] <= most_bytes
            again_s = np.maximum(model.unrecomputed_bytes[base, size] * SAFE - most_bytes, 0)
            again_s *= model.saving_s_per_byte[base, size]
            if not one.all():
                level_s = _at_one_level(model, base, size, most_bytes) - beside_s
                fits &= one | np.isfinite(level_s)
                again_s = np.where(one, again_s, np.maximum(again_s, level_s))
            again_s = np.where(fits, again_s, 0.0)
        # messages hide behind recomputation too; sums of max(a, b) are at least the max of sums, so layer by layer no
        # less is exposed
        busy_s = beside_s + again_s
        whole_s = np.maximum(moved_s, busy_s) + prices.costs.serial_share * np.minimum(moved_s, busy_s)
        busiest_s = np.maximum(busiest_s, whole_s / pieces)
        if model.in_a_row:
            once_s += (whole_s - beside_s) * one
        if model.pace.shape[2] > 1:
            width = configurations.ranks[rows] // pp
            speed = _speed(prices.scenario.cluster, model.pace[base, size], width, pp)
            busiest_s = np.maximum(busiest_s, model.total_s[base, size] / (speed * vp))
        step_s = np.where(one, m - 1, vp.astype(np.int64) * m + pp - 1) * busiest_s + once_s
        alive = m if configurations.schedule == "gpipe" else 1
        need_bytes[rows] = (state_bytes + alive * model.kept_bytes[base, size]) / pp
        roomy_ns[rows] = np.minimum(step_s * (1e9 * SAFE), NEVER)
        may = need_bytes[rows] * SAFE <= room_bytes
        step_ns[rows] = np.where(fits & may, roomy_ns[rows], NEVER)
        any_order_ns[rows] = np.where(may, np.minimum(any_s * (1e9 * SAFE), NEVER), NEVER)
    parts = _parts(model, ends, which)
    return FirstBounds(
        step_ns=step_ns, roomy_ns=roomy_ns, any_order_ns=any_order_ns, need_bytes=need_bytes, parts=parts
    )


def _blocks(count: int, stop: Callable[[], bool]) -> Iterator[slice]:
    for start in range(0, count, CHUNK_ROWS):
        if stop():
            raise Stopped
        yield slice(start, start + CHUNK_ROWS)


def _parts(model: _Model, ends: Floats, which: IntArray) -> FirstParts:
    return FirstParts(
        sizes=model.sizes,
        kind_s=model.kind_s,
        forward_s=model.forward_s,
        unrecomputed_bytes=model.of_kinds_bytes[0],
        kept_bytes=model.of_kinds_bytes[1],
        further=model.further,
        unknown=model.unknown,
        lag_s=model.lag_s,
        ends=ends,
        which=which,
    )


def _model(prices: Prices, groups: GroupGraph, configurations: Configurations, tables: FirstTables) -> _Model:
    kinds, member = prices.kinds, prices.members(groups).astype(np.float64)
    levels, quickest = allowed_levels(prices.scenario), quickest_levels(prices.scenario)
    *by_pool, forward_s = np.moveaxis(tables.work_s, 2, 0)
    by_pool_s = np.stack(by_pool, axis=2)
    kind_s = by_pool_s.min(axis=2)
    group_s = kind_s @ member.T  # [base, size, group]
    works = kind_s > 0
    ratios = np.where(works[:, :, None], by_pool_s / np.where(works, kind_s, 1.0)[:, :, None], np.inf)
    unrecomputed, kept = np.moveaxis(tables.kept_bytes, 2, 0)
    saved = unrecomputed - kept
    # which kinds a level recomputes that the quickest does not; unknown where attention alone may be recomputed
    drops = np.array([[Layout(recompute=level).recomputed(layer) != "none" for layer in kinds] for level in levels])
    selective = "selective" in levels
    further = drops[:1] & False if selective or len(quickest) > 1 else drops & ~drops[0]
    rates = np.where(saved > 0, forward_s / np.where(saved > 0, saved, 1.0), np.inf).min(axis=2)
    return _Model(
        sizes=tables.sizes,
        path_s=_paths(groups, group_s),
        lag_s=_lags(prices, groups, configurations, tables.sizes),
        kept_bytes=kept @ member.sum(axis=0),
        busiest_s=busiest(group_s, member, int((configurations.pp * configurations.vp).max())),
        total_s=group_s.sum(axis=2),
        pace=ratios.min(axis=3),
        counts=tables.counts[:, 0] @ member.sum(axis=0),
        in_a_row=tail_start(len(groups.groups), groups.pairs) == 0,
        unrecomputed_bytes=unrecomputed @ member.sum(axis=0),
        levels_s=group_s.sum(axis=2) + np.stack([forward_s @ (of * member.sum(axis=0)) for of in further]),
        levels_bytes=np.stack([np.where(of | selective, kept, unrecomputed) @ member.sum(axis=0) for of in further]),
        saving_s_per_byte=np.where(np.isfinite(rates), rates, 0.0) * (not selective),
        kind_s=kind_s,
        forward_s=forward_s,
        of_kinds_bytes=(unrecomputed, kept),
        further=np.broadcast_to(further, (len(further), len(kinds))),
        unknown=selective,
    )


def _paths(groups: GroupGraph, group_s: Floats) -> Floats:
    """[base, size] the heaviest path of one microbatch."""
    path_s = group_s.copy()
    for producer, consumer in sorted(groups.pairs, key=lambda pair: pair[1]):
        path_s[..., consumer] = np.maximum(path_s[..., consumer], group_s[..., consumer] + path_s[..., producer])
    longest: Floats = path_s.max(axis=2)
    return longest


def busiest(group_s: Floats, member: Floats, most: int) -> Floats:
    """[base, size, stages - 1] the mean, and of n groups at least as heavy as one the ceil(n / stages) on one stage."""
    stages = np.arange(1, most + 1)
    busiest_s: Floats = group_s.sum(axis=2)[..., None] / stages
    kinds, first, count = np.unique(member, axis=0, return_index=True, return_counts=True)
    kind_s = group_s[..., first]
    order = np.argsort(-kind_s, axis=2)
    heavy_s, so_many = np.take_along_axis(kind_s, order, axis=2), np.cumsum(count[order], axis=2)
    for place in range(len(kinds)):
        shared = -(-so_many[..., place, None] // stages) * heavy_s[..., place, None]
        np.maximum(busiest_s, shared, out=busiest_s)
    return busiest_s


def _most_kept(
    schedule: ScheduleName, room_bytes: int, state_bytes: Floats, stages: Column, microbatches: Column
) -> Floats:
    """[rows] bytes of one microbatch that all stages in a row can keep: a stage that holds q of them keeps 1/q of the
    room that states leave it, and states cost least where q is largest."""
    full = np.minimum(state_bytes // room_bytes, stages)
    left = (stages - full).astype(np.int64)  # stages without a full load of states
    rest_bytes = np.where(left > 0, room_bytes - (state_bytes - full * room_bytes), 0.0)
    if schedule == "gpipe":
        most: Floats = (np.maximum(left - 1, 0) * room_bytes + rest_bytes) / microbatches
        return most
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, int(stages.max()) + 1))])
    free = np.maximum(left - 1, 0)
    shallow = np.minimum(free, microbatches)
    most = room_bytes * (harmonic[shallow] + (free - shallow) / microbatches)
    most += rest_bytes / np.maximum(np.minimum(microbatches, left), 1)
    return most


def _at_one_level(model: _Model, base: Column, size: IntArray, most_bytes: Floats) -> Floats:
    """[rows] work of the model at the lightest level that keeps no more than that, infinite where none does."""
    least_s = np.full(len(most_bytes), np.inf)
    for level_s, level_bytes in zip(model.levels_s, model.levels_bytes, strict=True):
        fits = level_bytes[base, size] <= most_bytes
        least_s = np.where(fits, np.minimum(least_s, level_s[base, size]), least_s)
    return least_s


def _most_in_chunks(room_bytes: int, state_bytes: Floats, ranks: Column) -> Floats:
    """[rows] the same of ranks with several chunks each: once warmed up, of p ranks the d-th from the end holds at
    least min(p, 2 d - 1) microbatches of each of its layers (`held_by_chunks`)."""
    full = np.minimum(state_bytes // room_bytes, ranks)
    left = (ranks - full).astype(np.int64)
    rest_bytes = np.where(left > 0, room_bytes - (state_bytes - full * room_bytes), 0.0)
    odd = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, 2 * int(ranks.max()) + 2, 2))])
    free, half = np.maximum(left - 1, 0), (ranks.astype(np.int64) + 1) // 2
    few = np.minimum(free, half)
    most: Floats = room_bytes * (odd[few] + (free - few) / ranks)
    most += rest_bytes / np.maximum(np.minimum(ranks, 2 * left - 1), 1)
    return most


def _speed(cluster: Cluster, pace: Floats, width: IntArray, stages: Column) -> Floats:
    """[rows] how many of the quickest stages do as much as all stages of `width` ranks, laid pool after pool.

    A stage goes at the pace of the slowest pool that it touches.
    """
    ends = np.cumsum([pool.device_count for pool in cluster.pools])
    speed = np.zeros(len(width))
    for stage in range(int(stages.max())):
        first, last = stage * width, (stage + 1) * width - 1
        slowest = np.ones(len(width))
        for pool, end in enumerate(ends.tolist()):
            touched = (first < end) & (last >= end - cluster.pools[pool].device_count)
            slowest = np.where(touched, np.maximum(slowest, pace[:, pool]), slowest)
        speed += np.where(stage < stages, 1 / slowest, 0.0)
    return speed


def _lags(prices: Prices, groups: GroupGraph, configurations: Configurations, sizes: IntArray) -> Floats:
    """[base, size] of the tensors between two stages in a row at least one is sent; none is counted beside branches."""
    bases, in_rows = configurations.bases, prices.scenario.technique.sequence_parallel
    found = np.zeros((len(bases), len(sizes)))
    if tail_start(len(groups.groups), groups.pairs) > 0:
        return found
    known: dict[tuple[Layout, int], float] = {}
    for row, base in enumerate(bases):
        for column, size in enumerate(sizes.tolist()):
            # no more than with what spread modules gather; with sequence parallelism tp ranks send their rows
            alone = base if base.patches else Layout(tp=base.tp if in_rows else 1, cp=base.cp)
            if (alone, size) not in known:
                ways = [lag_s for near in (True, False) for lag_s in prices.lags_s(groups.edges, alone, size, near)]
                known[alone, size] = min(ways, default=0.0)
            found[row, column] = known[alone, size]
    return found
