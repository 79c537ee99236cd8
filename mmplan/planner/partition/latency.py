"""The device placement of a DAG of operators for the latency of one sample: its value, and the best one with a proof.

Each accelerator works once: when all inputs of its nodes are there it takes them in, computes, and hands its outputs
out, with the transfer times that it also pays for throughput. Every node on a CPU starts when its own inputs are there,
on a core of its own. Objective and rules are those of Tarnawski et al., "Efficient Algorithms for Device Placement of
DNN Graph Operators", NeurIPS 2020, section 4, where accelerators hold one contiguous set each.

A placement adds accelerators and single groups on CPUs, one after another, to a downset. A *label* of a downset says
how many accelerators work and when each output that is still needed is there; one that is nowhere later and nowhere
more is kept in place of another. Labels from which the longest path of what is left does not end in time die. Where
the deadline comes first the bound is the longest path alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmplan.errors import InfeasibleError, NoPlanFoundError
from mmplan.planner.partition.downsets import list_downsets
from mmplan.planner.partition.dp import Table, loads, make_table
from mmplan.planner.partition.groups import PS_PER_S, GroupProblem, floor_ps, group_nodes
from mmplan.planner.partition.latency_labels import Labels, best_labels, least_paths_ps, live_nodes
from mmplan.planner.partition.problem import PartitionProblem
from mmplan.planner.stopping import Deadline

MAX_DOWNSETS = 20_000
FIRST_TRIED = 16  # downsets before each, for a first placement
CPU = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyResult:
    """The best placement: an accelerator or `CPU` of each node; and the latency that no placement is below.

    `cores`: most nodes that work on CPUs at a time.
    """

    device_of: tuple[int, ...]
    objective_s: float
    bound_s: float
    cores: int
    groups: int
    downsets: int

    @property
    def optimal(self) -> bool:
        """The bound meets the objective up to what rounding loses: 1 ps for each node and each output of a device."""
        return self.objective_s <= self.bound_s * (1 + 1e-12) + 2 * len(self.device_of) / PS_PER_S


def latency_s(problem: PartitionProblem, device_of: Sequence[int]) -> tuple[float, tuple[tuple[float, float], ...]]:
    """The objective, infinite when a node cannot run where it is; and when each node on a CPU starts and ends.

    Raises:
        ValueError: accelerators wait for each other, or one holds too many bytes.
    """
    devices = sorted({device for device in device_of if device != CPU})
    blocks = [[node for node, device in enumerate(device_of) if device == mine] for mine in devices]
    blocks += [[node] for node, device in enumerate(device_of) if device == CPU]
    block_of = {node: index for index, block in enumerate(blocks) for node in block}
    inputs: list[set[int]] = [set() for _ in blocks]
    outputs: list[set[int]] = [set() for _ in blocks]
    for node, consumers in enumerate(problem.consumers):
        for consumer in consumers:
            if block_of[node] != block_of[consumer]:
                inputs[block_of[consumer]].add(node)
                outputs[block_of[node]].add(node)
    for block in blocks[: len(devices)]:
        if math.fsum(problem.size_bytes[node] for node in block) > problem.capacity_bytes:
            raise ValueError("an accelerator holds more than its capacity")
    there_s: dict[int, float] = {}
    spans, left = [], list(range(len(blocks)))
    while left:
        ready = [index for index in left if all(node in there_s for node in inputs[index])]
        if not ready:
            raise ValueError("accelerators wait for each other")
        for index in ready:
            start_s = max((there_s[node] for node in inputs[index]), default=0.0)
            if index < len(devices):
                parts = [problem.accelerator_s[node] for node in blocks[index]]
                parts += [problem.transfer_s[node] for node in (*inputs[index], *outputs[index])]
            else:
                parts = [problem.cpu_s[node] for node in blocks[index]]
                spans.append((start_s, start_s + parts[0]))
            there_s |= dict.fromkeys(blocks[index], start_s + math.fsum(parts))
        left = [index for index in left if index not in ready]
    return max(there_s.values()), tuple(spans)


def solve_latency(problem: PartitionProblem, deadline: Deadline) -> LatencyResult:
    """First with a single label for each downset and number of accelerators, then, under the value of that, with all.

    Raises:
        InfeasibleError: no placement exists.
        NoPlanFoundError: the deadline passed first, or the DAG has too many downsets.
    """
    groups = group_nodes(problem)
    member = list_downsets(groups.groups, groups.edges, MAX_DOWNSETS)
    if member is None:
        raise NoPlanFoundError(f"the DAG has more than {MAX_DOWNSETS:,} downsets, of which labels are kept")
    table = make_table(groups, member)
    first = _search(problem, table, math.inf, 1, deadline) or _search(problem, table, math.inf, None, deadline)
    if first is None:
        raise InfeasibleError(
            f"no placement: {sum(groups.size_bytes)} bytes in groups of up to {max(groups.size_bytes)}, "
            f"{groups.accelerators} accelerators hold {groups.capacity_bytes} bytes each, {groups.cpus} CPUs"
        )
    least_ps = _longest_path_ps(problem)
    try:
        best = _search(problem, table, first[0], None, deadline) or first
        bound_ps, device_of = best
    except NoPlanFoundError:  # the first one stands
        bound_ps, device_of = least_ps, first[1]
    objective_s, spans = latency_s(problem, device_of)
    return LatencyResult(
        device_of=device_of,
        objective_s=objective_s,
        bound_s=bound_ps / PS_PER_S,
        cores=max((sum(a <= start < b for a, b in spans) for start, _ in spans), default=0),
        groups=groups.groups,
        downsets=table.count,
    )


def _longest_path_ps(problem: PartitionProblem) -> float:
    """No placement is quicker: each node where it is quickest, and no transfers."""
    own_ps = [floor_ps(min(pair)) for pair in zip(problem.accelerator_s, problem.cpu_s, strict=True)]
    return float((np.array(own_ps) + least_paths_ps(problem)).max())


def _search(
    problem: PartitionProblem, table: Table, most_ps: float, keep: int | None, deadline: Deadline
) -> tuple[float, tuple[int, ...]] | None:
    """Least latency of at most `most_ps`, and the device of each node; `keep` labels of a downset and number of
    accelerators, None: all."""
    groups = table.problem
    live = live_nodes(problem, groups, table.member)
    tail_ps = least_paths_ps(problem)
    labels: list[Labels] = [Labels.start()]
    index_of = {row.tobytes(): place for place, row in enumerate(np.packbits(table.member, axis=1))}
    for last in range(1, table.count):
        if deadline.passed():
            raise NoPlanFoundError(f"no proof in {deadline.limit_s:g} s")
        firsts = np.array([place for place in range(last) if labels[place].count], dtype=np.int64)
        work_ps = loads(table, firsts, np.array([last]))[0][:, 0]
        least_ps = live.least_ps(firsts, work_ps, last, tail_ps)
        worth = least_ps <= most_ps if keep is None else np.isfinite(least_ps)
        if keep is not None and worth.sum() > FIRST_TRIED:
            worth &= least_ps <= np.partition(least_ps, FIRST_TRIED)[FIRST_TRIED]
        found = [live.by_accelerator(labels, firsts[worth], work_ps[worth], last)]
        if groups.cpus:
            found += [live.by_cpu(labels, before, group, last) for before, group in _without_one(table, last, index_of)]
        own = best_labels(found, tail_ps[live.nodes[last]], most_ps, groups.accelerators, keep)
        live.remember(last, own)
        labels.append(own)
    end = labels[-1]
    if not end.count:
        return None
    place = int(np.argmin(end.done_ps))
    return float(end.done_ps[place]), _devices(problem, groups, table, labels, place)


def _without_one(table: Table, last: int, index_of: dict[bytes, int]) -> list[tuple[int, int]]:
    """Downsets that lack one group of this one, and the group."""
    found, row = [], table.member[last].copy()
    for group in np.flatnonzero(row).tolist():
        row[group] = False
        before = index_of.get(np.packbits(row).tobytes())
        row[group] = True
        if before is not None and not table.problem.needs_accelerator[group]:
            found.append((before, group))
    return found


def _devices(
    problem: PartitionProblem, groups: GroupProblem, table: Table, labels: list[Labels], place: int
) -> tuple[int, ...]:
    """Back from a label of the last downset."""
    device_of, last, used = [CPU] * problem.nodes, table.count - 1, 0
    while last:
        label = labels[last]
        before = int(label.before[place])
        if not label.on_cpu[place]:
            for group in np.flatnonzero(table.member[last] & ~table.member[before]).tolist():
                for node in groups.members[group]:
                    device_of[node] = used
            used += 1
        last, place = before, int(label.parent[place])
    return tuple(device_of)
