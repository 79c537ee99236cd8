"""Labels of downsets: when each output that is still needed is there, on how many accelerators so far."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmplan.planner.partition.dp import Table
from mmplan.planner.partition.groups import GroupProblem, floor_ps
from mmplan.planner.partition.problem import PartitionProblem
from mmplan.planner.upsets import BoolArray, FloatArray, IntArray

COMPARED = 256  # labels held against the kept ones at a time


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Labels:
    """[labels] accelerators `used`, the latest end so far `done_ps`, [labels, live nodes] `there_ps`; where each comes
    from: the downset `before`, its label `parent`, and whether by a CPU."""

    used: IntArray
    done_ps: FloatArray
    there_ps: FloatArray
    before: IntArray
    parent: IntArray
    on_cpu: BoolArray

    @classmethod
    def start(cls) -> "Labels":
        """That of the empty downset."""
        none = np.zeros(1, dtype=np.int64)
        return cls(
            used=none,
            done_ps=np.zeros(1),
            there_ps=np.zeros((1, 0)),
            before=none,
            parent=none,
            on_cpu=np.zeros(1, dtype=np.bool_),
        )

    @classmethod
    def one(cls, done_ps: float, there_ps: FloatArray) -> "Labels":
        """A single label that came from nowhere."""
        return replace(cls.start(), done_ps=np.array([done_ps]), there_ps=there_ps[None, :])

    @classmethod
    def none(cls, live: int) -> "Labels":
        """No label of a downset with so many live nodes."""
        return replace(cls.start(), there_ps=np.zeros((1, live))).taken(np.zeros(0, dtype=np.int64))

    @property
    def count(self) -> int:
        return len(self.used)

    def taken(self, rows: IntArray | BoolArray) -> "Labels":
        """Some of them."""
        return Labels(
            used=self.used[rows],
            done_ps=self.done_ps[rows],
            there_ps=self.there_ps[rows],
            before=self.before[rows],
            parent=self.parent[rows],
            on_cpu=self.on_cpu[rows],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LiveNodes:
    """Of each downset the nodes with consumers outside: `nodes[d]`, and their `place[d, node]` among these.

    `reach[node, d]`: consumers of the node in downset d; `inside[d, node]`: the node is in it.
    """

    nodes: list[IntArray]
    place: IntArray
    reach: IntArray
    inside: BoolArray
    groups: GroupProblem
    inputs: list[list[int]]
    cpu_ps: FloatArray
    padded: IntArray
    padded_reach: IntArray
    soonest_ps: FloatArray

    def remember(self, last: int, labels: Labels) -> None:
        """When each live node of a downset is there at the soonest, in any of its labels."""
        if labels.count:
            self.soonest_ps[last, : len(self.nodes[last])] = labels.there_ps.min(axis=0)

    def least_ps(self, firsts: IntArray, work_ps: FloatArray, last: int, tail_ps: FloatArray) -> FloatArray:
        """[firsts] no label of `last` by an accelerator behind one of these downsets ends sooner."""
        nodes = self.nodes[last]
        feeds = self.reach[self.padded[firsts], last] > self.padded_reach[firsts]
        start_ps = np.where(feeds, self.soonest_ps[firsts], 0.0).max(axis=1, initial=0.0)
        behind_ps = np.where(self.inside[firsts][:, nodes], 0.0, tail_ps[nodes]).max(axis=1, initial=0.0)
        least: FloatArray = start_ps + work_ps + behind_ps
        return least

    def by_accelerator(self, labels: Sequence[Labels], firsts: IntArray, work_ps: FloatArray, last: int) -> Labels:
        """An accelerator takes everything between a downset and this one."""
        parts = [Labels.none(len(self.nodes[last]))]
        for first, spent_ps in zip(firsts.tolist(), work_ps.tolist(), strict=True):
            if np.isinf(spent_ps):
                continue
            old, held = labels[first], self.nodes[first]
            feeds = self.reach[held, last] > self.reach[held, first]
            start_ps = old.there_ps[:, feeds].max(axis=1, initial=0.0)
            parts.append(self._with(old, first, last, (start_ps + spent_ps)[:, None], old.used + 1, on_cpu=False))
        return _joined(parts)

    def by_cpu(self, labels: Sequence[Labels], before: int, group: int, last: int) -> Labels:
        """CPUs take the nodes of one group, each when its own inputs are there."""
        old = labels[before]
        there: dict[int, FloatArray] = {}
        members = set(self.groups.members[group])
        for node in sorted(members, key=lambda one: self._rank(one, members)):
            start_ps = np.zeros(old.count)
            for source in self.inputs[node]:
                ready_ps = there[source] if source in members else old.there_ps[:, self.place[before, source]]
                start_ps = np.maximum(start_ps, ready_ps)
            there[node] = start_ps + self.cpu_ps[node]
        end_ps = np.stack([there[node] for node in sorted(members)], axis=1)
        column = {node: index for index, node in enumerate(sorted(members))}
        own = [column.get(int(node), 0) for node in self.nodes[last]]
        return self._with(old, before, last, end_ps, old.used, on_cpu=True, own=own)

    def _rank(self, node: int, members: set[int]) -> int:
        """Longest path inside the group that ends at the node."""
        return max((1 + self._rank(source, members) for source in self.inputs[node] if source in members), default=0)

    def _with(
        self,
        old: Labels,
        first: int,
        last: int,
        end_ps: FloatArray,
        used: IntArray,
        *,
        on_cpu: bool,
        own: Sequence[int] = (),
    ) -> Labels:
        """Labels of `last` after those of `first`; `end_ps`: of what is new, in one column or in those of `own`."""
        nodes = self.nodes[last]
        was = self.inside[first, nodes]
        new_ps = end_ps[:, list(own)] if own else np.repeat(end_ps[:, :1], len(nodes), axis=1)
        there_ps = new_ps.copy()
        there_ps[:, was] = old.there_ps[:, self.place[first, nodes[was]]]
        count = old.count
        return Labels(
            used=used,
            done_ps=np.maximum(old.done_ps, end_ps.max(axis=1)),
            there_ps=there_ps,
            before=np.full(count, first),
            parent=np.arange(count),
            on_cpu=np.full(count, on_cpu),
        )


def live_nodes(problem: PartitionProblem, groups: GroupProblem, member: BoolArray) -> LiveNodes:
    """Of each downset."""
    group_of = np.empty(problem.nodes, dtype=np.int64)
    for group, members in enumerate(groups.members):
        group_of[list(members)] = group
    inside = member[:, group_of]
    reach = np.zeros((problem.nodes, len(member)), dtype=np.int64)
    inputs: list[list[int]] = [[] for _ in range(problem.nodes)]
    for node, consumers in enumerate(problem.consumers):
        for consumer in consumers:
            reach[node] += inside[:, consumer]
            inputs[consumer].append(node)
    total = np.array([len(consumers) for consumers in problem.consumers])
    live = inside & (total > reach.T)
    place = np.cumsum(live, axis=1) - 1
    nodes = [np.flatnonzero(row) for row in live]
    padded = np.zeros((len(member), max(map(len, nodes))), dtype=np.int64)
    padded_reach = np.full(padded.shape, problem.nodes, dtype=np.int64)  # no padding has more consumers
    for downset, own in enumerate(nodes):
        padded[downset, : len(own)] = own
        padded_reach[downset, : len(own)] = reach[own, downset]
    return LiveNodes(
        nodes=nodes,
        padded=padded,
        padded_reach=padded_reach,
        soonest_ps=np.zeros(padded.shape),
        place=place,
        reach=reach,
        inside=inside,
        groups=groups,
        inputs=inputs,
        cpu_ps=np.array(
            [floor_ps(value) if np.isfinite(value) else np.inf for value in problem.cpu_s], dtype=np.float64
        ),
    )


def without_one(table: Table) -> list[list[tuple[int, int]]]:
    """Of each downset: downsets that lack one group of it, and the group, where a CPU can take that."""
    groups = table.problem
    index_of = {row.tobytes(): place for place, row in enumerate(np.packbits(table.member, axis=1))}
    found: list[list[tuple[int, int]]] = []
    for member in table.member.copy():
        found.append([])
        for group in np.flatnonzero(member).tolist() if groups.cpus else ():
            member[group] = False
            before = index_of.get(np.packbits(member).tobytes())
            member[group] = True
            if before is not None and not groups.needs_accelerator[group]:
                found[-1].append((before, group))
    return found


def least_paths_ps(problem: PartitionProblem) -> FloatArray:
    """[nodes] the longest path behind each node, each node where it is quickest."""
    least_ps = [floor_ps(min(pair)) for pair in zip(problem.accelerator_s, problem.cpu_s, strict=True)]
    tail_ps: dict[int, int] = {}
    waiting = list(range(problem.nodes))
    while waiting:
        node = waiting[-1]
        open_ones = [consumer for consumer in problem.consumers[node] if consumer not in tail_ps]
        if open_ones:
            waiting += open_ones
            continue
        waiting.pop()
        tail_ps[node] = max((least_ps[c] + tail_ps[c] for c in problem.consumers[node]), default=0)
    return np.array([tail_ps[node] for node in range(problem.nodes)], dtype=np.float64)


def best_labels(
    parts: Sequence[Labels], tail_ps: FloatArray, most_ps: float, accelerators: int, keep: int | None
) -> Labels:
    """Those that may end in time and that no other one beats; with `keep` so many for a number of accelerators."""
    every = _joined(parts)
    least_ps = np.maximum(every.done_ps, (every.there_ps + tail_ps).max(axis=1, initial=0.0))
    alive = (least_ps <= most_ps) & np.isfinite(every.done_ps) & (every.used <= accelerators)
    every, least_ps = every.taken(alive), least_ps[alive]
    if keep is not None:
        order = np.lexsort((least_ps, every.used))
        used = every.used[order]
        first = np.searchsorted(used, used)
        return every.taken(order[np.arange(len(order)) - first < keep])
    values = np.concatenate([every.used[:, None], every.done_ps[:, None], every.there_ps], axis=1)
    order = np.lexsort((values.sum(axis=1), least_ps, every.used))
    kept: list[int] = []
    for start in range(0, len(order), COMPARED):
        some = order[start : start + COMPARED]
        if kept:
            some = some[~_beaten(values[some], values[kept])]
        mine = values[some]  # a label that beats another one, or equals it, stands before it in this order
        alone = [place for place in range(len(some)) if not _beaten(mine[place : place + 1], mine[:place])[0]]
        kept += some[alone].tolist()
    return every.taken(np.array(kept, dtype=np.int64))


def _beaten(mine: FloatArray, others: FloatArray) -> BoolArray:
    """[mine] some other one is nowhere more."""
    nowhere_more: BoolArray = np.less_equal(others[None, :, :], mine[:, None, :])
    return np.array([bool(rows.all(axis=1).any()) for rows in nowhere_more], dtype=np.bool_)


def _joined(parts: Sequence[Labels]) -> Labels:
    return Labels(
        used=np.concatenate([part.used for part in parts]),
        done_ps=np.concatenate([part.done_ps for part in parts]),
        there_ps=np.concatenate([part.there_ps for part in parts]),
        before=np.concatenate([part.before for part in parts]),
        parent=np.concatenate([part.parent for part in parts]),
        on_cpu=np.concatenate([part.on_cpu for part in parts]),
    )
