"""What no placement's latency is below: all labels of a downset merged into one that is nowhere later than any of them.

Accelerators are as many as one likes here, each with its capacity; transfers are paid as ever. Where each merged label
comes from tells a placement, which is often a good one.
"""

import math
from dataclasses import dataclass

import numpy as np

from mmplan.errors import NoPlanFoundError
from mmplan.planner.partition.dp import Table, loads
from mmplan.planner.partition.latency_labels import Labels, LiveNodes, without_one
from mmplan.planner.stopping import Deadline
from mmplan.planner.upsets import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MergedLabels:
    """`bound_ps`: infinite where nothing ends in time; `before[d]`, `on_cpu[d]`: where its soonest comes from."""

    bound_ps: float
    before: IntArray
    on_cpu: BoolArray


def merged_labels(
    table: Table, live: LiveNodes, tail_ps: FloatArray, most_ps: float, deadline: Deadline
) -> MergedLabels:
    """Those of placements that may end by `most_ps`.

    Raises:
        NoPlanFoundError: the deadline came first.
    """
    there_ps, done_ps = np.zeros(live.padded.shape), np.full(table.count, math.inf)
    done_ps[0] = 0.0
    labels = [Labels.start()]
    before, on_cpu = np.zeros(table.count, dtype=np.int64), np.zeros(table.count, dtype=np.bool_)
    befores = without_one(table)
    for last in range(1, table.count):
        if deadline.passed():
            raise NoPlanFoundError(f"no bound in {deadline.limit_s:g} s")
        nodes = live.nodes[last]
        firsts, end_ps, when_ps = _by_accelerators(table, live, last, done_ps, there_ps)
        by_accelerator = len(firsts)
        for one, group in befores[last]:
            if labels[one].count:
                by_cpu = live.by_cpu(labels, one, group, last)
                firsts = np.append(firsts, one)
                end_ps, when_ps = np.append(end_ps, by_cpu.done_ps), np.append(when_ps, by_cpu.there_ps, axis=0)
        least_ps = np.maximum(end_ps, (when_ps + tail_ps[nodes]).max(axis=1, initial=0.0))
        alive = least_ps <= most_ps
        own = Labels.none(len(nodes))
        if alive.any():
            best = int(np.argmin(least_ps))
            before[last], on_cpu[last] = firsts[best], best >= by_accelerator
            done_ps[last], there_ps[last, : len(nodes)] = end_ps[alive].min(), when_ps[alive].min(axis=0)
            own = Labels.one(done_ps[last], there_ps[last, : len(nodes)])
        labels.append(own)
    return MergedLabels(bound_ps=float(done_ps[-1]), before=before, on_cpu=on_cpu)


def _by_accelerators(
    table: Table, live: LiveNodes, last: int, done_ps: FloatArray, there_ps: FloatArray
) -> tuple[IntArray, FloatArray, FloatArray]:
    """An accelerator takes all behind a downset. [downsets] which, the latest end, [downsets, live nodes] the ends."""
    firsts = np.flatnonzero(np.isfinite(done_ps[:last]))
    work_ps = loads(table, firsts, np.array([last]))[0][:, 0]
    firsts, work_ps = firsts[np.isfinite(work_ps)], work_ps[np.isfinite(work_ps)]
    own_ps, nodes = there_ps[firsts], live.nodes[last]
    feeds = live.reach[live.padded[firsts], last] > live.padded_reach[firsts]
    end_ps = np.where(feeds, own_ps, 0.0).max(axis=1, initial=0.0) + work_ps
    held = np.ix_(firsts, nodes)
    was_ps = np.take_along_axis(own_ps, np.maximum(live.place[held], 0), axis=1)
    when_ps = np.where(live.inside[held], was_ps, end_ps[:, None])
    return firsts, np.maximum(done_ps[firsts], end_ps), when_ps
