"""The network of sweeps over several nodes, in the form of all-reduce that predicts all of them best.

NCCL runs an all-reduce over nodes as rings through all ranks, or as trees over the nodes (NVLSTree with switches). On
two nodes of eight a tree sends 8/15 of a ring's bytes, so that one table means a network of 49 GB/s a device or of 26.
One table alone cannot tell: gathers (always rings), messages, other numbers of nodes and the device's port can.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, median_high, median_low

from mmplan.cost_models.formats.nccl_collective import TWICE
from mmplan.cost_models.formats.nccl_fit import (
    Fit,
    fit_one_level,
    fit_two_levels,
    group_of_sweep,
    large_points,
    with_rate,
)
from mmplan.cost_models.formats.nccl_sweep import Sweep
from mmplan.scenario.cluster import Link
from mmplan.units import format_bytes_per_s

# What a link is priced with where several collectives were measured: the first group that is there.
_FIRST = (("all_reduce", "all_reduce_bias", "all_gather", "reduce_scatter"), ("sendrecv",), ("alltoall", "alltoallv"))
_ALIKE = 0.01  # forms whose errors differ by less are not told apart
_ROUNDING = 1.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """`node` is None unless tables over nodes move it; `told` says which form the numbers support."""

    link: Link
    node: Link | None
    error: float
    told: tuple[str, ...] = ()


def network_of(
    sweeps: Sequence[Sweep], node: Link, network: Link, *, node_is_known: bool, port_bytes_per_s: float
) -> Network:
    """The network that predicts sweeps over nodes, which are one at least.

    Args:
        node, network: what no message shows.
        port_bytes_per_s: the most that a device's share of the network can be.
    """
    trees = _fitted(sweeps, node, network, node_is_known=node_is_known)
    if not any(sweep.collective in TWICE and group_of_sweep(sweep).per_node > 1 for sweep in sweeps):
        return trees
    rings = _fitted(sweeps, node, replace(network, rings=True), node_is_known=node_is_known)
    if not any(large_points(sweep) for sweep in sweeps):
        return rings
    rates = [format_bytes_per_s(found.link.reached_bytes_per_s) for found in (rings, trees)]
    if abs(rings.error - trees.error) >= _ALIKE:
        kept = min(rings, trees, key=lambda found: found.error)
        errors = [f"{100 * found.error:.1f} %" for found in (rings, trees)]
        why = f"the tables are missed by {errors[0]} as rings through all ranks, by {errors[1]} as trees over nodes"
    elif rings.link.reached_bytes_per_s > port_bytes_per_s * _ROUNDING >= trees.link.reached_bytes_per_s:
        kept, port = trees, format_bytes_per_s(port_bytes_per_s)
        why = f"rings through all ranks would need {rates[0]} a device, more than a port has ({port})"
    else:
        kept = rings
        why = f"the tables fit both forms; as trees over nodes the network would have {rates[1]} instead of {rates[0]}"
    form = "trees over nodes" if kept is trees else "rings through all ranks"
    return replace(kept, told=(f"all-reduces over nodes are read as {form}: {why}",))


def _fitted(sweeps: Sequence[Sweep], node: Link, network: Link, *, node_is_known: bool) -> Network:
    fits = [_fit_across(sweep, node, network, node_is_known=node_is_known) for sweep in sweeps]
    link = joined([(fit, fit.network) for fit in fits if fit.network is not None])
    moved = [(fit, fit.node) for fit in fits if fit.node is not None and fit.node != node]
    own = joined(moved) if moved else None
    return Network(link=link, node=own, error=fmean(_error(sweep, own or node, link) for sweep in sweeps))


def _fit_across(sweep: Sweep, node: Link, network: Link, *, node_is_known: bool) -> Fit:
    if group_of_sweep(sweep).per_node == 1 or sweep.collective == "sendrecv":  # whose slowest message crosses nodes
        return fit_one_level(sweep, network, network=True)
    return fit_two_levels(sweep, node, network, node_is_known=node_is_known)


def _error(sweep: Sweep, node: Link, network: Link) -> float:
    """Median of |logarithm of predicted / measured| where bandwidth counts."""
    fit = Fit(sweep=sweep, node=node, network=network, latency=True, bandwidth=True)
    points = large_points(sweep)
    return median(abs(math.log(fit.ratio(point))) for point in points) if points else 0.0


def inside_is_slower(fit: Fit) -> bool:
    """A faster network would change nothing: it was taken to be as fast as it must be at least."""
    if fit.network is None or fit.sweep.nodes == 1 or group_of_sweep(fit.sweep).per_node == 1:
        return False
    faster = replace(fit, network=with_rate(fit.network, 10 * fit.network.reached_bytes_per_s))
    return all(faster.ratio(point) > 0.97 * fit.ratio(point) for point in large_points(fit.sweep)[-1:])


def joined(found: Sequence[tuple[Fit, Link]]) -> Link:
    """One link of several: middle numbers of the collectives that training uses most, rates of those that show it."""
    group = _first_group(found)
    first = group[0][1]
    showing = _first_group([pair for pair in found if pair[0].bandwidth and not inside_is_slower(pair[0])] or found)
    rates = [link.reached_bytes_per_s for fit, link in showing if fit.bandwidth]
    latencies = [link.latency_s for fit, link in group if fit.latency]
    link = replace(
        first,
        latency_s=median_high(latencies) if latencies else first.latency_s,
        nvls=any(link.nvls for _, link in group),
        pipelined=any(link.pipelined for _, link in found),
    )
    return with_rate(link, median_low(rates)) if rates else link


def _first_group(found: Sequence[tuple[Fit, Link]]) -> list[tuple[Fit, Link]]:
    return next(
        kept for names in _FIRST if (kept := [(fit, link) for fit, link in found if fit.sweep.collective in names])
    )
