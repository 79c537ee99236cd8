"""Fronts of an objective against memory and against devices, by epsilon constraints: one limit after the other.

Each limit is a scenario of its own (devices with less memory, a part of the cluster), solved to its proven gap. So
every point is a plan, and below its bound no plan within the limit can be.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import floor
from typing import Literal

from mmplan.errors import InfeasibleError, NoPlanFoundError
from mmplan.planner.configuration import divisors
from mmplan.planner.first_bounds import NEVER
from mmplan.planner.frontier import Frontier
from mmplan.planner.objective import ObjectiveName
from mmplan.planner.objective_value import result_values
from mmplan.planner.plan import Plan
from mmplan.planner.repeated import Limits
from mmplan.planner.result import OptimizeResult
from mmplan.planner.space import build_space
from mmplan.scenario.cluster import Cluster, Pool
from mmplan.scenario.scenario import Scenario

Axis = Literal["memory", "devices"]
AXES: tuple[Axis, ...] = ("memory", "devices")


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontPoint:
    """The best plan that needs at most `limit` (bytes that a rank may use, or devices). `cost`: what it needs of that.

    `value` is that of the objective by the closed form, and no plan within the limit is below `bound`. `dominated`:
    another plan of the same front costs no more and is no worse.
    """

    axis: Axis
    limit: int
    cost: int
    plan: Plan
    value: float
    bound: float
    objective: ObjectiveName = "step-time"
    dominated: bool = False

    @property
    def step_s(self) -> float:
        """The closed form, which the bound belongs to."""
        return self.plan.certificate.objective_s


def memory_front(scenario: Scenario, limits: Limits, points: int) -> Iterator[FrontPoint]:
    """From the memory that the fastest plan needs downwards, in steps of 1 / points of it, until nothing fits.

    Raises:
        InfeasibleError, NoPlanFoundError: there is no first plan.
    """
    first = limits.solve(scenario)
    limit = max(stage.capacity_bytes for stage in first.plan.stages)
    step = fullest_bytes(first.plan) // points
    result: OptimizeResult | None = first
    while result is not None and not limits.stop():
        cost = fullest_bytes(result.plan)
        yield _point("memory", limit, cost, result, limits)
        limit = cost - step
        result = _within(with_memory(scenario, limit), limits) if limit > _reserved_bytes(scenario) else None


def device_front(scenario: Scenario, limits: Limits) -> Iterator[FrontPoint]:
    """All devices, then nodes halved, then parts of one node, until nothing fits.

    Raises:
        InfeasibleError, NoPlanFoundError: there is no first plan.
    """
    for index, cluster in enumerate(smaller_clusters(scenario.cluster)):
        if limits.stop():
            return
        smaller = replace(scenario, cluster=cluster)
        result = limits.solve(smaller) if index == 0 else _within(smaller, limits)
        if result is None:
            return
        yield _point("devices", cluster.device_count, result.plan.rank_count, result, limits)


def _point(axis: Axis, limit: int, cost: int, result: OptimizeResult, limits: Limits) -> FrontPoint:
    name = limits.objective.name
    value, bound = result_values(result, name)
    return FrontPoint(axis=axis, limit=limit, cost=cost, plan=result.plan, value=value, bound=bound, objective=name)


def marked(points: Iterable[FrontPoint]) -> tuple[FrontPoint, ...]:
    """The points in their order, with those dominated that another one of their axis beats."""
    every = tuple(points)
    return tuple(replace(point, dominated=any(_beats(other, point) for other in every)) for point in every)


def with_memory(scenario: Scenario, usable_bytes: int) -> Scenario:
    """The same devices with no more memory than leaves so much after the headroom."""
    memory_bytes = floor(usable_bytes / (1 - scenario.constraints.memory_headroom))
    pools = tuple(
        replace(pool, device=replace(pool.device, memory_bytes=min(pool.device.memory_bytes, memory_bytes)))
        for pool in scenario.cluster.pools
    )
    return replace(scenario, cluster=replace(scenario.cluster, pools=pools))


def smaller_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, then with half of its nodes (the last pools go first), down to one, then with parts of that node."""
    nodes = sum(pool.nodes for pool in cluster.pools)
    counts = [nodes] + [1 << power for power in reversed(range(nodes.bit_length())) if 1 << power < nodes]
    for count in counts:
        yield replace(cluster, pools=_first_nodes(cluster.pools, count))
    node = _first_nodes(cluster.pools, 1)[0]
    for devices in reversed(divisors(node.devices_per_node)[:-1]):
        yield replace(cluster, pools=(replace(node, devices_per_node=devices),))


def fullest_bytes(plan: Plan) -> int:
    """Memory of the rank that needs most."""
    return max(stage.memory_bytes for stage in plan.stages)


def _first_nodes(pools: tuple[Pool, ...], count: int) -> tuple[Pool, ...]:
    found = []
    for pool in pools:
        taken = min(pool.nodes, count)
        if taken:
            found.append(replace(pool, nodes=taken))
        count -= taken
    return tuple(found)


def _within(scenario: Scenario, limits: Limits) -> OptimizeResult | None:
    """The best plan's; None where there is none, none was found in time, or Ctrl-C came before its proof."""
    try:
        space = build_space(scenario)
        if Frontier(space.bounds, space.scale).least_value() == NEVER:
            return None
        result = limits.solve(scenario)
    except (InfeasibleError, NoPlanFoundError):
        return None
    return None if limits.stop() and result.plan.certificate.status != "optimal" else result


def _reserved_bytes(scenario: Scenario) -> int:
    return max(pool.device.reserved_bytes for pool in scenario.cluster.pools)


def _beats(other: FrontPoint, point: FrontPoint) -> bool:
    if other.axis != point.axis or (other.cost, other.value) == (point.cost, point.value):
        return False
    return other.cost <= point.cost and other.value <= point.value
