"""A placement of least busiest load, with a proof.

First the dynamic program along a few topological orders, which gives an upper bound, then under that bound over all
downsets, which gives the optimum. When the DAG has too many downsets for that, CP-SAT searches below the upper bound.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mmplan.errors import InfeasibleError, NoPlanFoundError
from mmplan.planner.partition.cpsat import place_by_cpsat
from mmplan.planner.partition.downsets import list_downsets, list_prefixes, topological_keys
from mmplan.planner.partition.dp import make_table, search_under, trace
from mmplan.planner.partition.groups import PS_PER_S, GroupAnswer, GroupPlacement, GroupProblem, group_nodes
from mmplan.planner.partition.problem import PartitionProblem, Placement, busiest_load_s
from mmplan.planner.stopping import Deadline
from mmplan.planner.upsets import BoolArray

# 22,487 downsets of 313 groups take 1.6 s and 0.2 GB, 87,516 of 161 groups 115 s and 0.4 GB, one core.
MAX_DOWNSETS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionResult:
    """The best placement, and the busiest load that no placement can be below.

    `method` closed the search: `dp`, or `cpsat` where there were too many `downsets` (then None).
    """

    placement: Placement
    objective_s: float
    bound_s: float
    method: Literal["dp", "cpsat"]
    groups: int
    downsets: int | None

    @property
    def optimal(self) -> bool:
        """The bound meets the objective up to what rounding loses: 1 ps for each node and each output of a device."""
        rounding_s = 2 * len(self.placement.stage_of) / PS_PER_S
        return self.objective_s <= self.bound_s * (1 + 1e-12) + rounding_s


def solve_partition(
    problem: PartitionProblem, deadline: Deadline, *, max_downsets: int = MAX_DOWNSETS
) -> PartitionResult:
    """The best placement found within the deadline, and a proven bound.

    Args:
        max_downsets: of a DAG that the dynamic program may search; above it CP-SAT does.

    Raises:
        InfeasibleError: proved: no placement fits the devices.
        NoPlanFoundError: the deadline passed before a placement was found.
    """
    groups = group_nodes(problem)
    some = list_prefixes(groups.groups, groups.edges, topological_keys(groups.groups, groups.edges))
    first = _search(groups, some, _everything_ps(groups), deadline).found
    member = list_downsets(groups.groups, groups.edges, max_downsets)
    high_ps = first.value_ps if first else _everything_ps(groups)
    if member is None:
        answer = place_by_cpsat(groups, least_load_ps(groups), high_ps - 1 if first else high_ps, deadline)
    else:
        answer = _search(groups, member, high_ps, deadline)
    found = answer.found or first
    if found is None and answer.bound_ps > high_ps:
        raise InfeasibleError(_why_infeasible(groups))
    if found is None:
        raise NoPlanFoundError(f"no placement found in {deadline.limit_s:g} s; that there is none is not proved")
    placement = _placement(problem, groups, found)
    return PartitionResult(
        placement=placement,
        objective_s=busiest_load_s(problem, placement),
        bound_s=min(answer.bound_ps, found.value_ps) / PS_PER_S,
        method="cpsat" if member is None else "dp",
        groups=groups.groups,
        downsets=None if member is None else len(member),
    )


def least_load_ps(groups: GroupProblem) -> int:
    """A bound from sums: all work spread evenly over all devices, and the dearest group where it is cheapest."""
    least_ps = []
    for group, (work, cpu) in enumerate(zip(groups.accelerator_ps, groups.cpu_ps, strict=True)):
        choices = [] if groups.needs_cpu[group] else [work]
        choices += [cpu] if groups.cpus and not groups.needs_accelerator[group] else []
        least_ps.append(min(choices, default=0))
    return max(max(least_ps), sum(least_ps) // (groups.accelerators + groups.cpus))


def _everything_ps(groups: GroupProblem) -> int:
    """No device can be busier than this."""
    return max(1, sum(groups.accelerator_ps) + sum(groups.cpu_ps) + sum(net.cost_ps for net in groups.nets))


def _search(groups: GroupProblem, member: BoolArray, cap_ps: int, deadline: Deadline) -> GroupAnswer:
    """The best placement along these downsets of at most `cap_ps`; the bound speaks of these downsets only."""
    table = make_table(groups, member)
    search = search_under(table, cap_ps, deadline.passed)
    least_ps = least_load_ps(groups) if search.ended else cap_ps + 1
    if np.isinf(search.value_ps):
        return GroupAnswer(found=None, bound_ps=least_ps)
    stages = trace(table, search)
    stage_of = sum((~table.member[last]).astype(np.int64) for last, _ in stages)
    value_ps = int(search.value_ps)
    found = GroupPlacement(
        stage_of=tuple(int(stage) for stage in stage_of),
        on_cpu=tuple(on_cpu for _, on_cpu in stages),
        value_ps=value_ps,
    )
    return GroupAnswer(found=found, bound_ps=min(least_ps, value_ps))


def _placement(problem: PartitionProblem, groups: GroupProblem, found: GroupPlacement) -> Placement:
    stage_of = [0] * problem.nodes
    for members, stage in zip(groups.members, found.stage_of, strict=True):
        for node in members:
            stage_of[node] = stage
    return Placement(stage_of=tuple(stage_of), on_cpu=found.on_cpu)


def _why_infeasible(groups: GroupProblem) -> str:
    sizes = f"{sum(groups.size_bytes)} bytes in groups of up to {max(groups.size_bytes)}"
    capacity = "all" if groups.capacity_bytes is None else f"{groups.capacity_bytes} bytes each"
    only = f"{sum(groups.needs_cpu)} groups run on CPUs alone, {sum(groups.needs_accelerator)} on accelerators alone"
    return f"no placement: {sizes}, {groups.accelerators} accelerators hold {capacity}, {groups.cpus} CPUs; {only}"
