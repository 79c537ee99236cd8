"""Which of many configurations with several chunks per rank could have a step below a limit, before any is looked at
closer: a few array operations each.

A limit on the step is one on the busiest chunk. At one level of recomputation for all layers, chunks are filled from
the first group on, each to the brim: too many, and none is within the limit. The same limit says how much of its
microbatches a chunk can keep. Chunks of one rank differ in how many they hold (`held_by_chunks`), and those that hold
few have no time for all layers. With a price n* - n per second on a chunk that holds n, where what most layers keep
per second is beta,

    bytes in flight >= n* sum min(kept, beta work) + n_least sum max(0, kept - beta work) - beta limit sum (n* - n)

for any n*; with the states it has to be within the memory of all ranks.
"""

from dataclasses import dataclass

import numpy as np

from mmplan.planner.configurations import Configurations
from mmplan.planner.contract import GroupGraph
from mmplan.planner.first_bounds import SAFE, FirstBounds
from mmplan.planner.first_ends import Floats
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import room_bytes_of
from mmplan.planner.quantise import NS_PER_S
from mmplan.planner.schedules.in_flight import held_by_chunks
from mmplan.planner.upsets import BoolArray, IntArray

# Of the chunks in the order of what they hold, where n* is tried.
TRIED = (1.0, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lanes:
    """[rows]: index of the pair of layout and microbatch size, ranks, chunks in all, seconds that the busiest chunk may
    take, bytes of all states. [rows, tried] `most`: n*, `below`: sum of n* - n over chunks that hold less; [rows]
    `least`: n of the chunk that holds the fewest."""

    pair: IntArray
    ranks: IntArray
    chunks: IntArray
    limit_s: Floats
    state_bytes: Floats
    most: Floats
    below: Floats
    least: Floats


def may_be_below(
    prices: Prices,
    groups: GroupGraph,
    configurations: Configurations,
    first: FirstBounds,
    rows: IntArray,
    steps_ns: IntArray,
) -> BoolArray:
    """[rows] False where no cut into chunks has a step below that of the row.

    Args:
        rows: with several chunks per rank.
    """
    parts, member = first.parts, prices.members(groups).astype(np.float64)
    base, size = configurations.base[rows], np.searchsorted(parts.sizes, configurations.microbatch_size[rows])
    codes, pair = np.unique(base.astype(np.int64) * len(parts.sizes) + size, return_inverse=True)
    at = np.divmod(codes, len(parts.sizes))
    lanes = _lanes(configurations, first, rows, steps_ns, pair)
    room_bytes = room_bytes_of(prices.scenario) * lanes.ranks / SAFE
    may = np.zeros(len(rows), dtype=np.bool_)
    for further in parts.further:
        work_s = parts.kind_s[at] + parts.forward_s[at] * further
        kept_bytes = np.where(further | parts.unknown, parts.kept_bytes[at], parts.unrecomputed_bytes[at])
        open_rows = np.flatnonzero(~may)
        some = _within(work_s @ member.T, lanes, open_rows)
        open_rows = open_rows[some]
        need_bytes = _need_bytes(work_s, kept_bytes, member.sum(axis=0), lanes, open_rows)
        may[open_rows] = need_bytes <= room_bytes[open_rows]
    return may


def _lanes(
    configurations: Configurations, first: FirstBounds, rows: IntArray, steps_ns: IntArray, pair: IntArray
) -> _Lanes:
    ranks, loops = (column[rows].astype(np.int64) for column in (configurations.pp, configurations.vp))
    microbatches = configurations.microbatches[rows].astype(np.int64)
    finish_s, state_bytes, _ = first.parts.ends[first.parts.which[rows]].T
    sizes = np.searchsorted(first.parts.sizes, configurations.microbatch_size[rows])
    once_s = (ranks * loops - 1) * first.parts.lag_s[configurations.base[rows], sizes] + finish_s / ranks
    shapes, shape = np.unique(np.stack([ranks, loops, microbatches]), axis=1, return_inverse=True)
    held = np.array([_held(*map(int, one)) for one in shapes.T])[shape.ravel()]
    return _Lanes(
        pair=pair.ravel(),
        ranks=ranks,
        chunks=ranks * loops,
        limit_s=np.maximum(steps_ns / NS_PER_S / SAFE - once_s, 0.0) / (loops * microbatches + ranks - 1),
        state_bytes=state_bytes,
        most=held[:, : len(TRIED)],
        below=held[:, len(TRIED) : -1],
        least=held[:, -1],
    )


def _held(ranks: int, loops: int, microbatches: int) -> list[float]:
    """n*, sums of n* - n, and the least n, of means over the moments of each rank: what no moment exceeds, no mean
    does."""
    means = [np.mean(held_by_chunks(ranks, loops, microbatches, rank), axis=0) for rank in range(ranks)]
    held = np.sort(np.concatenate(means))
    most = [float(held[int(part * (len(held) - 1))]) for part in TRIED]
    return [*most, *(float(np.maximum(one - held, 0.0).sum()) for one in most), float(held[0])]


def _within(group_s: Floats, lanes: _Lanes, rows: IntArray) -> BoolArray:
    """[rows] whether chunks of groups in a row, each within the limit, are no more than the row has.

    Args:
        group_s: [pair, group] work.
    """
    sums = np.concatenate([np.zeros((len(group_s), 1)), np.cumsum(group_s, axis=1)], axis=1)
    width, shift = sums.shape[1], 3.0 * float(sums[:, -1].max()) + 1.0
    ascending = (sums + shift * np.arange(len(sums))[:, None]).ravel()
    pair, limit_s = lanes.pair[rows], lanes.limit_s[rows]
    placed, count = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    active = np.arange(len(rows))
    while len(active):
        own = pair[active]
        limit = (sums[own, placed[active]] + limit_s[active]) * (1 + 1e-9) + shift * own * (1 + 1e-15)
        ahead = np.minimum(np.searchsorted(ascending, limit, side="right") - 1 - own * width, width - 1)
        stuck = ahead <= placed[active]
        count[active] += 1
        count[active[stuck]] = width  # more than any row has
        placed[active] = np.maximum(ahead, placed[active])
        active = active[~stuck & (ahead < width - 1) & (count[active] < lanes.chunks[rows[active]])]
    done: BoolArray = (placed == width - 1) & (count <= lanes.chunks[rows])
    return done


def _need_bytes(work_s: Floats, kept_bytes: Floats, count: Floats, lanes: _Lanes, rows: IntArray) -> Floats:
    """[rows] memory of all ranks together, at least.

    Args:
        work_s, kept_bytes: [pair, kind] of a microbatch.
        count: [kind] layers.
    """
    pairs = np.arange(len(work_s))
    most = (kept_bytes * count).argmax(axis=1)
    beta = kept_bytes[pairs, most] / np.maximum(work_s[pairs, most], 1e-12)
    even_bytes = np.minimum(kept_bytes, beta[:, None] * work_s) @ count
    odd_bytes, own = kept_bytes @ count - even_bytes, lanes.pair[rows]
    priced = beta[own] * lanes.limit_s[rows]
    flying = lanes.most[rows] * even_bytes[own][:, None] - priced[:, None] * lanes.below[rows]
    need: Floats = lanes.state_bytes[rows] + flying.max(axis=1, initial=0.0) + lanes.least[rows] * odd_bytes[own]
    return need
