"""The device placement of a DAG of operators for the latency of one sample: its value, and the best one with a proof.

Each accelerator works once: when all inputs of its nodes are there it takes them in, computes, and hands its outputs
out, with the transfer times that it also pays for throughput. Every node on a CPU starts when its own inputs are there,
on a core of its own. Objective and rules are those of Tarnawski et al., "Efficient Algorithms for Device Placement of
DNN Graph Operators", NeurIPS 2020, section 4, where accelerators hold one contiguous set each.

A placement adds accelerators and single groups on CPUs, one after another, to a downset. A *label* of a downset says
how many accelerators work and when each output that is still needed is there; one that is nowhere later and nowhere
more is kept in place of another. Labels from which the longest path of what is left does not end in time die. Where
the deadline comes first the bound is that of merged labels, or the longest path alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmplan.errors import InfeasibleError, NoPlanFoundError
from mmplan.planner.partition.downsets import list_downsets, list_prefixes, topological_keys
from mmplan.planner.partition.dp import Table, loads, make_table
from mmplan.planner.partition.groups import PS_PER_S, floor_ps, group_nodes
from mmplan.planner.partition.latency_bound import MergedLabels, merged_labels
from mmplan.planner.partition.latency_labels import Labels, best_labels, least_paths_ps, live_nodes, without_one
from mmplan.planner.partition.problem import PartitionProblem
from mmplan.planner.stopping import Deadline

MAX_DOWNSETS = 20_000
FIRST_TRIED = 16  # downsets before each, for a first placement
CPU = -1
Found = tuple[float, tuple[int, ...]]  # a latency, and the device of each node


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
    """First along a few orders of the groups, then a bound of all placements, then, under the value of the first, with
    a single label for each downset and number of accelerators, and last with all labels.

    Raises:
        InfeasibleError: no placement exists.
        NoPlanFoundError: the deadline passed first, or the DAG has too many downsets.
    """
    groups = group_nodes(problem)
    orders = topological_keys(groups.groups, groups.edges)
    found = _search(
        problem, make_table(groups, list_prefixes(groups.groups, groups.edges, orders)), math.inf, 1, deadline
    )
    bound_ps, count = _longest_path_ps(problem), 0
    member = list_downsets(groups.groups, groups.edges, MAX_DOWNSETS)
    if member is not None:
        count = len(member)
        found, bound_ps = _over_all(problem, make_table(groups, member), found, bound_ps, deadline)
    if found is None and member is None:
        raise NoPlanFoundError(f"the DAG has more than {MAX_DOWNSETS:,} downsets, of which labels are kept")
    if found is None:
        raise InfeasibleError(
            f"no placement: {sum(groups.size_bytes)} bytes in groups of up to {max(groups.size_bytes)}, "
            f"{groups.accelerators} accelerators hold {groups.capacity_bytes} bytes each, {groups.cpus} CPUs"
        )
    objective_s, spans = latency_s(problem, found[1])
    return LatencyResult(
        device_of=found[1],
        objective_s=objective_s,
        bound_s=bound_ps / PS_PER_S,
        cores=max((sum(a <= start < b for a, b in spans) for start, _ in spans), default=0),
        groups=groups.groups,
        downsets=count,
    )


def _over_all(
    problem: PartitionProblem, table: Table, found: Found | None, bound_ps: float, deadline: Deadline
) -> tuple[Found | None, float]:
    """A placement that is no worse, None where there is none, and what none is below: both as good as the deadline
    lets them be.

    Raises:
        NoPlanFoundError: the deadline passed, and nothing is found.
    """
    try:
        if found is not None:
            live, tail_ps = live_nodes(problem, table.problem, table.member), least_paths_ps(problem)
            merged = merged_labels(table, live, tail_ps, found[0], deadline)
            bound_ps = max(bound_ps, min(found[0], merged.bound_ps))
            found = _better(problem, table, merged, found)
            if found[0] <= bound_ps:
                return found, bound_ps
        first = _search(problem, table, math.inf if found is None else found[0], 1, deadline)
        found = first or found or _search(problem, table, math.inf, None, deadline)
        if found is not None and bound_ps < found[0]:
            found = _search(problem, table, found[0], None, deadline) or found
            bound_ps = found[0]
    except NoPlanFoundError:
        if found is None:
            raise
    return found, bound_ps


def _longest_path_ps(problem: PartitionProblem) -> float:
    """No placement is quicker: each node where it is quickest, and no transfers."""
    own_ps = [floor_ps(min(pair)) for pair in zip(problem.accelerator_s, problem.cpu_s, strict=True)]
    return float((np.array(own_ps) + least_paths_ps(problem)).max())


def _search(
    problem: PartitionProblem, table: Table, most_ps: float, keep: int | None, deadline: Deadline
) -> Found | None:
    """Least latency of at most `most_ps`, and the device of each node; `keep` labels of a downset and number of
    accelerators, None: all."""
    groups = table.problem
    live = live_nodes(problem, groups, table.member)
    tail_ps = least_paths_ps(problem)
    labels: list[Labels] = [Labels.start()]
    befores = without_one(table)
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
        found += [live.by_cpu(labels, before, group, last) for before, group in befores[last]]
        own = best_labels(found, tail_ps[live.nodes[last]], most_ps, groups.accelerators, keep)
        live.remember(last, own)
        labels.append(own)
    end = labels[-1]
    if not end.count:
        return None
    place = int(np.argmin(end.done_ps))
    return float(end.done_ps[place]), _devices(problem, table, labels, place)


def _better(problem: PartitionProblem, table: Table, merged: MergedLabels, found: Found) -> Found:
    """The placement that merged labels tell, where it can be and is quicker than the one found."""
    if not math.isfinite(merged.bound_ps):
        return found
    chain, last = [], table.count - 1
    while last:
        chain.append((int(merged.before[last]), last, bool(merged.on_cpu[last])))
        last = chain[-1][0]
    device_of = _placed(problem, table, chain)
    if max(device_of) >= problem.accelerators:
        return found
    latency_ps = _latency_ps(problem, device_of)
    return (latency_ps, device_of) if latency_ps < found[0] else found


def _latency_ps(problem: PartitionProblem, device_of: Sequence[int]) -> float:
    """As labels count it: every duration in whole picoseconds that are not more."""
    durations = problem.accelerator_s, problem.cpu_s, problem.transfer_s
    whole = [tuple(floor_ps(value) if math.isfinite(value) else value for value in column) for column in durations]
    floored = replace(problem, accelerator_s=whole[0], cpu_s=whole[1], transfer_s=whole[2])
    return latency_s(floored, device_of)[0]


def _devices(problem: PartitionProblem, table: Table, labels: list[Labels], place: int) -> tuple[int, ...]:
    """Back from a label of the last downset."""
    chain, last = [], table.count - 1
    while last:
        label = labels[last]
        chain.append((int(label.before[place]), last, bool(label.on_cpu[place])))
        last, place = chain[-1][0], int(label.parent[place])
    return _placed(problem, table, chain)


def _placed(problem: PartitionProblem, table: Table, chain: Sequence[tuple[int, int, bool]]) -> tuple[int, ...]:
    """The device of each node, from downsets that follow one another, and whether a CPU takes what is between."""
    device_of, used = [CPU] * problem.nodes, 0
    for before, last, on_cpu in chain:
        if not on_cpu:
            for group in np.flatnonzero(table.member[last] & ~table.member[before]).tolist():
                for node in table.problem.members[group]:
                    device_of[node] = used
            used += 1
    return tuple(device_of)
