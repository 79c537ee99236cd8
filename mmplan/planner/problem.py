"""The stage-cut problem of one configuration: layer prices summed over groups, in whole nanoseconds and bytes.

What is affine stays affine: the end of a step is bounded from below by a fixed part per stage that trains anything and
a part per parameter, which is exact for the analytic cost model up to the launch time of one operator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmplan.cost_models.counts import edge_bytes
from mmplan.errors import InputError
from mmplan.planner.configuration import Configuration, replicas_per_node
from mmplan.planner.contract import GroupGraph
from mmplan.planner.cut_problem import CutEdge, CutProblem
from mmplan.planner.pricing import Prices
from mmplan.planner.quantise import ceil_bytes, floor_bytes, floor_ns, seconds
from mmplan.scenario.cluster import Cluster
from mmplan.scenario.scenario import DTYPE_BYTES, Scenario
from mmplan.units import format_bytes

LARGEST = 2**60  # nanoseconds (36 years) or bytes: sums of a few of them stay below 2**63
SECONDS_PER_YEAR = 365 * 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What every rank can count on, in a cluster of possibly unlike pools."""

    capacity_bytes: int  # of a device, less the headroom
    reserved_bytes: int
    devices_per_node: int


def machine_of(scenario: Scenario) -> Machine:
    """The least of all pools."""
    pools, headroom = scenario.cluster.pools, scenario.constraints.memory_headroom
    return Machine(
        capacity_bytes=min(floor_bytes(pool.device.memory_bytes * (1 - headroom)) for pool in pools),
        reserved_bytes=max(pool.device.reserved_bytes for pool in pools),
        devices_per_node=devices_per_node(scenario.cluster),
    )


def devices_per_node(cluster: Cluster) -> int:
    return min(pool.devices_per_node for pool in cluster.pools)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishPrice:
    """Seconds at the end of a step are at least fixed_s + per_parameter_s * trainable parameters of the stage."""

    fixed_s: float
    per_parameter_s: float


def finish_s(prices: Prices, configuration: Configuration, parameters: int) -> float:
    """Gradient all-reduce over the replicas and optimizer update of a stage with so many trainable parameters."""
    if parameters == 0:
        return 0.0
    costs, scenario = prices.costs, prices.scenario
    gradient_bytes = parameters * DTYPE_BYTES[scenario.optimizer.gradient_dtype] / configuration.tp
    near = replicas_per_node(configuration, devices_per_node(scenario.cluster))
    reduce_s = costs.all_reduce_s(gradient_bytes, configuration.dp, near) if configuration.dp > 1 else 0.0
    return reduce_s + costs.optimizer_s(parameters // configuration.tp)


def finish_price(prices: Prices, configuration: Configuration) -> FinishPrice:
    """The affine lower bound of `finish_s` over every size a stage can have."""
    sizes = sorted({count for count in prices.trainable.values() if count})
    total = sum(prices.trainable.values())
    if not sizes:
        return FinishPrice(fixed_s=0.0, per_parameter_s=0.0)
    return affine_below(lambda count: finish_s(prices, configuration, count), [*sizes, total // 2 + 1, total])


def affine_below(function: Callable[[int], float], sizes: Sequence[int]) -> FinishPrice:
    """The secant of the two largest sizes, lowered until it is below the function at all of them."""
    values = [function(size) for size in sizes]
    if sizes[-1] == sizes[-2]:
        return FinishPrice(fixed_s=0.0, per_parameter_s=min(v / s for v, s in zip(values, sizes, strict=True)))
    slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
    fixed = min(value - slope * size for value, size in zip(values, sizes, strict=True))
    if fixed >= 0:
        return FinishPrice(fixed_s=fixed, per_parameter_s=slope)
    return FinishPrice(fixed_s=0.0, per_parameter_s=min(v / s for v, s in zip(values, sizes, strict=True)))


def build_problem(prices: Prices, groups: GroupGraph, configuration: Configuration) -> CutProblem:
    """The integers of one configuration; times rounded down, bytes up, capacity down.

    Raises:
        InputError: a step or its memory is beyond what 64-bit integers count.
    """
    machine = machine_of(prices.scenario)
    layers = prices.layers(configuration.tp, configuration.microbatch_size)
    finish = finish_price(prices, configuration)
    members = groups.groups
    parameters = [sum(prices.trainable[layer] for layer in group) for group in members]
    problem = CutProblem(
        work_ns=tuple(
            floor_ns(sum(layers[layer].forward_s + layers[layer].backward_s for layer in group)) for group in members
        ),
        state_bytes=tuple(ceil_bytes(sum(layers[layer].state_bytes for layer in group)) for group in members),
        kept_bytes=tuple(ceil_bytes(sum(layers[layer].kept_bytes for layer in group)) for group in members),
        finish_ns=tuple(floor_ns(count * finish.per_parameter_s) for count in parameters),
        trainable=tuple(count > 0 for count in parameters),
        edges=_cut_edges(prices, groups, configuration),
        finish_fixed_ns=floor_ns(finish.fixed_s),
        capacity_bytes=floor_bytes(machine.capacity_bytes - machine.reserved_bytes),
        stages=configuration.pp,
        microbatches=configuration.microbatches,
        schedule=configuration.schedule,
    )
    _refuse_uncountable(problem, prices.scenario)
    return problem


def _refuse_uncountable(problem: CutProblem, scenario: Scenario) -> None:
    """Sums over all groups, edges and microbatches must stay whole numbers that arrays can hold."""
    slowest_ns = problem.microbatches * sum(problem.work_ns) + sum(edge.lag_ns for edge in problem.edges)
    slowest_ns += problem.finish_fixed_ns + sum(problem.finish_ns)
    if slowest_ns > LARGEST:
        message = f"a step of {scenario.name} could take {seconds(slowest_ns) / SECONDS_PER_YEAR:,.0f} years: "
        raise InputError(message + "check the sizes of the data and the rates and latencies of the cluster")
    fullest_bytes = sum(problem.state_bytes) + problem.most_in_flight * sum(problem.kept_bytes)
    if fullest_bytes > LARGEST:
        message = f"{scenario.name} could keep {format_bytes(fullest_bytes)} in one stage: "
        raise InputError(message + "check the sizes of the data and of the model")


def one_node(configuration: Configuration, cluster: Cluster) -> bool:
    """The closed form's one rule for all links of a configuration."""
    return configuration.ranks <= devices_per_node(cluster)


def lag_s(prices: Prices, configuration: Configuration, sent_bytes: float, carries_grad: bool) -> float:
    """Seconds a cut tensor is on its way, its gradient included where one flows back."""
    near = one_node(configuration, prices.scenario.cluster)
    return prices.costs.transfer_s(sent_bytes, near) * (2 if carries_grad else 1)


def _cut_edges(prices: Prices, groups: GroupGraph, configuration: Configuration) -> tuple[CutEdge, ...]:
    """One edge per pair of groups, with the largest lag among the tensors between them."""
    loads, precision = prices.loads(configuration.microbatch_size), prices.scenario.precision
    lag_ns: dict[tuple[int, int], int] = {}
    for edge, ends in zip(groups.edges, groups.ends, strict=True):
        one_ns = floor_ns(lag_s(prices, configuration, edge_bytes(edge, loads, precision), edge.carries_grad))
        lag_ns[ends] = max(one_ns, lag_ns.get(ends, 0))
    return tuple(CutEdge(producer=u, consumer=v, lag_ns=ns) for (u, v), ns in sorted(lag_ns.items()))
