"""The longest path through a program as waves: sets of nodes that depend only on earlier waves.

A node is an action, other than a receive, or a virtual one that only joins. Every node starts at the later end of at
most two others: its lane's last node (the rank's last compute, or the link's last transfer) and one input; joins make
two out of many, as trees. So a wave is two gathers, a maximum and a sum, for one or many vectors of durations. Waves
depend on the program alone: make them once and price them as often as wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mmplan.planner.columns import RECV, REDUCE, SEND, TIE, F, I, Integers, ProgramColumns, columns_of
from mmplan.planner.place import Lowered
from mmplan.planner.program import Program, is_ahead

Floats = NDArray[np.float64]

_SHORT_KEYS = 1 << 16  # numpy sorts 16-bit integers by radix, in linear time


class IrregularError(Exception):
    """A program that waves cannot time: an action listed twice, no partner, ranks that wait in a circle."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Waves:
    """Nodes in wave order. Index `size` stands for a node that has ended at 0.

    first: `[waves + 1]`, where each wave begins. lane, need: the two nodes each waits for. action: of the program's
    actions, which one a node is; -1 for a join. node: of each action, its node; receives have that of their send.
    """

    first: list[int]
    lane: Integers
    need: Integers
    action: Integers
    node: Integers

    @property
    def size(self) -> int:
        return len(self.lane)


def waves_of(program: Program) -> Waves:
    """The waves of a program that was not made by `lower_columns`.

    Raises:
        IrregularError: see there.
    """
    return column_waves(columns_of(program))


def column_waves(columns: ProgramColumns) -> Waves:
    """The same of a program's columns."""
    return build_waves(program_graph(columns), None)


def lowered_waves(lowered: Lowered) -> Waves:
    """The waves of a lowered program, whose levels are known."""
    return build_waves(program_graph(lowered.columns, lowered.match), lowered.level)


def gated_waves(columns: ProgramColumns) -> Waves:
    """Waves in which a receive is a node of its own that ends with its send plus the duration it is given: 0, or minus
    infinity for a tensor that one draw of durations lacks, so that no one waits for it.

    Raises:
        IrregularError: see `waves_of`.
    """
    graph = program_graph(columns, gated=True)
    return build_waves(graph, None)


def price(waves: Waves, durations_s: Floats) -> tuple[Floats, Floats]:
    """Start and end of every action.

    Args:
        durations_s: `[actions]`, or `[actions, draws]` for many at once; those of receives are unused.
    """
    ends_s = node_ends(waves, durations_s)
    starts_s = np.maximum(ends_s[waves.lane], ends_s[waves.need])
    return starts_s[waves.node], ends_s[waves.node]


def node_ends(waves: Waves, durations_s: Floats) -> Floats:
    """End of every node, and 0 behind the last."""
    size = waves.size
    known = np.zeros((len(durations_s) + 1, *durations_s.shape[1:]))
    known[:-1] = durations_s
    own_s = known[waves.action]  # -1, a join, is the last
    ends_s = np.zeros((size + 1, *durations_s.shape[1:]))
    lane, need, first = waves.lane, waves.need, waves.first
    begin = 0
    for end in first[1:]:
        found_s = ends_s.take(lane[begin:end], 0)
        np.maximum(found_s, ends_s.take(need[begin:end], 0), out=found_s)
        np.add(found_s, own_s[begin:end], out=ends_s[begin:end])
        begin = end
    return ends_s


@dataclass(slots=True, eq=False)
class Graph:
    """Nodes 0 to actions - 1 are the actions, joins follow; `none` in `lane` and `need` stands for nothing.

    join_level: for each join, the action that it stands before and its round.
    """

    columns: ProgramColumns
    lane: Integers
    need: Integers
    match: Integers  # of each action the node that has its times: itself, or a receive's send
    link_place: Integers  # of each send, how many sends of the same compute precede it on its link
    joins: list[tuple[Integers, Integers, Integers, int]] = field(default_factory=list)  # lane, need, for, round

    def join(self, group: Integers, node: Integers) -> Integers:
        """One node for each group of nodes; `group` is sorted and names the action that waits for them."""
        done, step = [np.zeros(0, dtype=np.int64)], 0
        size = len(self.lane) + sum(len(lane) for lane, *_ in self.joins)
        position = _position_in_group(group)
        while len(group) and (position > 0).any():
            (second,) = np.nonzero(position % 2 == 1)
            joined = np.arange(size, size + len(second))
            self.joins.append((node[second - 1], node[second], group[second], step))
            size += len(second)
            node = node.copy()
            node[second - 1] = joined
            kept = position % 2 == 0
            group, node = group[kept], node[kept]
            position = _position_in_group(group)
            step += 1
        done.append(node)
        return np.concatenate(done)


def _position_in_group(group: Integers) -> Integers:
    """0, 1, 2, ... within each run of equal values."""
    index = np.arange(len(group))
    begins = np.ones(len(group), dtype=bool)
    begins[1:] = group[1:] != group[:-1]
    return index - np.maximum.accumulate(np.where(begins, index, 0)) if len(group) else index


def program_graph(columns: ProgramColumns, match: Integers | None = None, *, gated: bool = False) -> Graph:
    """What each action waits for; `match` as in `Lowered`, found by name when it is not known; `gated` as in
    `gated_waves`.

    Raises:
        IrregularError: see there.
    """
    count, none = columns.size, -1
    row, kind = columns.row, columns.kind
    is_lane = (kind != SEND) & (kind != RECV)
    index = np.arange(count)
    last = np.maximum.accumulate(np.where(is_lane, index, -1)) if count else index
    before = np.concatenate([[-1], last[:-1]]) if count else index
    lane = np.where((before >= columns.first[row]) & (kind != RECV), before, none)
    need = np.full(count, none, dtype=np.int64)
    (sends,), (receives,) = np.nonzero(kind == SEND), np.nonzero(kind == RECV)
    match = _match(columns, row, sends, receives) if match is None else match
    if gated:
        lane[receives] = match[receives]
        match = index
    graph = Graph(columns=columns, lane=lane, need=need, match=match, link_place=np.zeros(count, dtype=np.int64))
    _link_lanes(graph, row, sends)
    _inputs(graph, row, receives)
    wait_for_replicas(graph)
    return graph


def _match(columns: ProgramColumns, row: Integers, sends: Integers, receives: Integers) -> Integers:
    """Of each action itself, of a receive the send of the same tensor."""
    match = np.arange(columns.size)
    tensors, microbatches = len(columns.tensors) + 1, columns.microbatches + 1

    def keys(actions: Integers, source: Integers, target: Integers) -> Integers:
        pair = (source * (int(columns.ranks.max(initial=0)) + 2) + target) * tensors + columns.tensor[actions]
        result: Integers = pair * microbatches + columns.microbatch[actions]
        return result

    own = columns.ranks[row]
    sent = keys(sends, own[sends], columns.peer[sends])
    wanted = keys(receives, columns.peer[receives], own[receives])
    order = np.argsort(sent, kind="stable")
    found = np.searchsorted(sent, wanted, sorter=order)
    if (np.diff(sent[order]) == 0).any() or (found == len(sent)).any() or (sent[order[found]] != wanted).any():
        raise IrregularError
    match[receives] = sends[order[found]]
    return match


def _link_lanes(graph: Graph, row: Integers, sends: Integers) -> None:
    """A send waits for the rank's last compute, as its input, and for the last transfer on its link, as its lane."""
    columns = graph.columns
    if not len(sends):
        return
    graph.need[sends] = graph.lane[sends]
    largest = int(max(columns.ranks.max(), columns.peer.max())) + 1
    link = row[sends] * largest + columns.peer[sends]
    order = np.argsort(link.astype(np.uint16) if link.max() < _SHORT_KEYS else link, kind="stable")
    queued, by_link = sends[order], link[order]
    follows = np.concatenate([[False], by_link[1:] == by_link[:-1]])
    graph.lane[queued] = np.where(follows, np.concatenate([[-1], queued[:-1]]), -1)
    same_compute = follows & (graph.need[queued] == np.concatenate([[-1], graph.need[queued][:-1]]))
    if same_compute.any():
        index = np.arange(len(queued))
        graph.link_place[queued] = index - np.maximum.accumulate(np.where(same_compute, 0, index))


def _inputs(graph: Graph, row: Integers, receives: Integers) -> None:
    """F, B and I wait for the tensors of this step that their rank has posted buffers for."""
    columns = graph.columns
    kind, microbatches = columns.kind, columns.microbatches
    ahead = np.array([is_ahead(name) for name in columns.tensors], dtype=bool)
    if ahead.any():
        receives = receives[~ahead[columns.tensor[receives]]]
    (computes,) = np.nonzero(kind <= I)
    if (columns.microbatch[computes] >= microbatches).any() or (columns.microbatch[receives] >= microbatches).any():
        raise IrregularError
    stages = int(columns.stage.max(initial=0)) + 1
    replica = columns.replicas * stages if columns.replicas.any() else None

    def cells(actions: Integers, half: NDArray[np.bool_]) -> Integers:
        stage = columns.stage[actions]
        stage = stage if replica is None else stage + replica[row[actions]]
        cell: Integers = (2 * stage + half) * microbatches + columns.microbatch[actions]
        return cell

    table = np.full((int(columns.replicas.max(initial=0)) + 1) * stages * 2 * microbatches, -1, dtype=np.int64)
    own = cells(computes, kind[computes] != F)
    table[own] = computes
    if (table[own] != computes).any():
        raise IrregularError
    readers = table[cells(receives, columns.is_gradient[columns.tensor[receives]])]
    if ((row[readers] != row[receives]) & (readers >= 0)).any():
        raise IrregularError
    posted = readers > receives
    readers, sent = readers[posted], graph.match[receives[posted]]
    if len(readers) and (np.diff(np.sort(readers)) > 0).all():
        graph.need[readers] = sent
        return
    order = np.argsort(readers, kind="stable")
    readers, sent = readers[order], sent[order]
    if len(readers):
        alone = graph.join(readers, sent)
        graph.need[readers[np.concatenate([[True], readers[1:] != readers[:-1]])]] = alone


def wait_for_replicas(graph: Graph) -> None:
    """A reduction waits for what every replica of its stage does before it, a sum over stages for those of its replica
    that hold the matrix."""
    columns = graph.columns
    (reduces,), (ties,) = np.nonzero(columns.kind == REDUCE), np.nonzero(columns.kind == TIE)
    if len(reduces):
        _meet(graph, reduces, columns.stage[reduces], np.bincount(columns.stages))
    if len(ties):
        replicas = int(columns.replicas.max()) + 1
        number = columns.microbatch[ties] * replicas + columns.replicas[columns.row[ties]]
        _meet(graph, ties, number, np.zeros(0, dtype=np.int64))


def _meet(graph: Graph, actions: Integers, meeting: Integers, expected: Integers) -> None:
    """Actions with the same number of a meeting wait for what each rank there does before; `expected` ranks are there
    where that is known."""
    columns = graph.columns
    order = np.argsort(meeting, kind="stable")
    number, order = meeting[order], actions[order]
    begins = np.concatenate([[True], number[1:] != number[:-1]])
    members = np.diff([*np.nonzero(begins)[0].tolist(), len(order)])
    known = np.concatenate([expected, np.zeros(int(number.max()) + 1, dtype=np.int64)])[number[begins]]
    twice = len(np.unique(np.stack([number, columns.row[order]]), axis=1).T) != len(order)
    if twice or ((known > 0) & (known != members)).any():
        raise IrregularError
    leader = np.repeat(order[begins], members)
    waits = (graph.lane[order] >= 0) & np.repeat(members > 1, members)
    if waits.any():
        group = leader[waits]
        joined = graph.join(group, graph.lane[order[waits]])
        of_leader = np.full(columns.size, -1, dtype=np.int64)
        of_leader[group[np.concatenate([[True], group[1:] != group[:-1]])]] = joined
        graph.need[order] = of_leader[leader]


def build_waves(graph: Graph, level: Integers | None) -> Waves:
    """Numbers the nodes wave by wave; finds the waves when the levels of actions are not known."""
    count = graph.columns.size
    lane = np.concatenate([graph.lane, *(join[0] for join in graph.joins)])
    need = np.concatenate([graph.need, *(join[1] for join in graph.joins)])
    is_node = np.ones(len(lane), dtype=bool)
    is_node[:count] = (graph.columns.kind != RECV) | (graph.match == np.arange(count))
    wave = _kahn(lane, need, is_node) if level is None else _fine_levels(graph, level)
    (nodes,) = np.nonzero(is_node)
    wave = wave[nodes]
    largest = int(wave.max(initial=0))
    order = np.argsort(wave.astype(np.uint16) if largest < _SHORT_KEYS else wave, kind="stable")
    nodes = nodes[order]
    sizes = np.bincount(wave, minlength=1)
    place = np.full(len(lane) + 1, len(nodes), dtype=np.int64)
    place[nodes] = np.arange(len(nodes))
    place[-1] = len(nodes)  # -1, nothing, is the last
    return Waves(
        first=[0, *np.cumsum(sizes[sizes > 0]).tolist()],
        lane=place[lane[nodes]],
        need=place[need[nodes]],
        action=np.where(nodes < count, nodes, -1),
        node=place[graph.match],
    )


def _fine_levels(graph: Graph, level: Integers) -> Integers:
    """Room between two levels for sends that queue behind one compute, and for joins just before what waits."""
    rounds = 1 + max((step for *_, step in graph.joins), default=-1)
    stride = rounds + 1 + int(graph.link_place.max(initial=0))
    parts = [level * stride + graph.link_place]
    parts += [level[waiting] * stride - rounds + step for _, _, waiting, step in graph.joins]
    return np.concatenate(parts)


def _kahn(lane: Integers, need: Integers, is_node: NDArray[np.bool_]) -> Integers:
    """The wave of each node: one more than the latest it waits for.

    Raises:
        IrregularError: some nodes wait in a circle.
    """
    size = len(lane)
    before = np.concatenate([lane, need])
    after = np.argsort(before, kind="stable")
    first = np.searchsorted(before[after], np.arange(size + 1))
    after %= size
    done = np.zeros(size + 1, dtype=bool)
    done[size] = True  # -1, nothing, is the last
    wave, seen = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.int64)
    (front,) = np.nonzero((lane == -1) & (need == -1) & is_node)
    step, total = 0, 0
    while len(front):
        wave[front] = step
        done[front] = True
        total += len(front)
        begins = first[front]
        counts = first[front + 1] - begins
        ends = np.cumsum(counts)
        later = after[np.repeat(begins - ends + counts, counts) + np.arange(ends[-1])]
        later = later[done[lane[later]] & done[need[later]]]
        seen[later] = np.arange(len(later))
        front = later[seen[later] == np.arange(len(later))]
        step += 1
    if total != int(is_node.sum()):
        raise IrregularError
    return wave


def rows_of(program: Program, values: Floats) -> tuple[tuple[float, ...], ...]:
    """Values of all actions as one tuple for each listed rank."""
    flat: Sequence[float] = values.tolist()
    rows, begin = [], 0
    for rank in program.ranks:
        rows.append(tuple(flat[begin : begin + len(rank.actions)]))
        begin += len(rank.actions)
    return tuple(rows)
