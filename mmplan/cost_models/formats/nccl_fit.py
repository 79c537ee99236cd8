"""Latency and bandwidth of links from sweeps, in the terms that collectives are priced with.

With `collectives.py` as the formula, the latency is such that the median of predicted / measured over small messages
(up to 64 KiB, within 1.5 of the quickest) is 1, the bandwidth such that it is 1 over large ones: the largest
sixteenfold range, of 16 MiB and more or 4 times the time of small ones; else the largest size from 1 MiB on. In between
NCCL changes protocols: what the two numbers give there is the residual, and moves neither. Medians are not moved by
slow calls. An all-to-all's latency is that of a whole exchange, not of a link, and is not fitted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from mmplan.cost_models.collectives import Group, all_reduce_s, all_to_all_s, gather_s, message_s
from mmplan.cost_models.formats.nccl_sweep import Point, Sweep
from mmplan.scenario.cluster import Link

PRICED = ("all_reduce", "all_reduce_bias", "all_gather", "reduce_scatter", "alltoall", "alltoallv", "sendrecv")
EXCHANGES = ("alltoall", "alltoallv")
SMALL_BYTES = 65_536
LARGE_BYTES = 16 * 2**20
LEAST_LARGE_BYTES = 2**20
# of a ring over NVLink: NCCL 2.18 src/graph/topo.h, SM90_NVLINK_BW 20.6 GB/s of 25 a link, and 3 %
MOST_RING_FRACTION = 20.6 / 25 * 1.03
_LARGE_RANGE = 16
_NEAR_FLOOR, _ABOVE_FLOOR = 1.5, 4.0
_LATENCY_RANGE_S = (1e-8, 1.0)
_RATE_RANGE = (1e3, 1e14)
_UNLIMITED = 1e15
_ROUNDS = 4
_SOLVED = 1e-3
# NCCL 2.18 src/graph/tuning.cc, hwLatencies: the latencies of NVLink and network that are scaled together
USUAL_NODE_LATENCY_S, USUAL_NETWORK_LATENCY_S = 3.4e-6, 14e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Links of a sweep; `latency` and `bandwidth` say whether the sweep has messages that show them."""

    sweep: Sweep
    node: Link | None
    network: Link | None
    latency: bool
    bandwidth: bool

    def ratio(self, point: Point) -> float:
        """Predicted over measured seconds."""
        return predicted_s(self.sweep, point.size_bytes, self.node, self.network) / point.time_s


def group_of_sweep(sweep: Sweep) -> Group:
    """Ranks and ranks per node; ValueError where the nodes are not known."""
    if sweep.nodes is None:
        raise ValueError("the nodes of the sweep are not known")
    ranks = sweep.ranks[0]
    return Group(ranks, max(1, ranks // sweep.nodes))


def predicted_s(sweep: Sweep, size_bytes: float, node: Link | None, network: Link | None) -> float:
    """Seconds of the sweep's collective as mmplan prices it."""
    group = group_of_sweep(sweep)
    near, far = node or network, network or node
    assert near is not None and far is not None
    if sweep.collective in ("all_gather", "reduce_scatter"):
        return gather_s(size_bytes, group, near, far)
    if sweep.collective in EXCHANGES:
        return all_to_all_s(size_bytes, group, near, far)
    if sweep.collective == "sendrecv":
        return message_s(size_bytes, near if group.nodes == 1 else far)
    return all_reduce_s(size_bytes, group, near, far)


def small_points(sweep: Sweep) -> list[Point]:
    """Messages whose time is latency of links."""
    if sweep.collective in EXCHANGES:
        return []
    return _near_floor(sweep)


def _near_floor(sweep: Sweep) -> list[Point]:
    small = [point for point in sweep.points if point.size_bytes <= SMALL_BYTES]
    if not small:
        return []
    floor_s = sorted(point.time_s for point in small)[len(small) // 4]
    return [point for point in small if point.time_s <= _NEAR_FLOOR * floor_s]


def large_points(sweep: Sweep) -> list[Point]:
    """Messages whose time is bandwidth."""
    most = sweep.points[-1].size_bytes
    small = _near_floor(sweep)
    floor_s = median(point.time_s for point in small) if small else math.inf
    large = [
        point
        for point in sweep.points
        if point.size_bytes * _LARGE_RANGE >= most
        and (point.size_bytes >= LARGE_BYTES or point.time_s >= _ABOVE_FLOOR * floor_s)
    ]
    return large or [point for point in sweep.points[-1:] if point.size_bytes >= LEAST_LARGE_BYTES]


def plain_fit(sweep: Sweep) -> tuple[float | None, float | None]:
    """alpha (s) and beta (bytes/s) of time = alpha + size / beta, each where messages show it."""
    small, large = _near_floor(sweep), large_points(sweep)
    alpha_s = median(point.time_s for point in small) if small else None
    rates = [point.size_bytes / (point.time_s - (alpha_s or 0.0)) for point in large if point.time_s > (alpha_s or 0.0)]
    return alpha_s, median(rates) if rates else None


def fit_one_level(sweep: Sweep, base: Link, *, network: bool) -> Fit:
    """The one link of a sweep inside a node, or of one rank in each node. `base` gives what no message shows; where its
    switches can add, all-reduces are taken to use them if that fits better or rings could not be as fast.
    """
    if not base.nvls or sweep.collective != "all_reduce":
        return _one_link(sweep, base, network=network)
    switched, ring = (_one_link(sweep, variant, network=network) for variant in (base, replace(base, nvls=False)))
    link = ring.network or ring.node
    if link is not None and link.fraction > MOST_RING_FRACTION:
        return switched  # no ring is as fast
    return min((switched, ring), key=_residual)


def _one_link(sweep: Sweep, base: Link, *, network: bool) -> Fit:
    """Rate and latency in turn, as either moves the other a little."""
    large, small = large_points(sweep), small_points(sweep)

    def fit_with(link: Link) -> Fit:
        return Fit(
            sweep=sweep,
            node=None if network else link,
            network=link if network else None,
            latency=bool(small),
            bandwidth=bool(large),
        )

    link = base
    for _ in range(_ROUNDS):
        link = _with_solved_rate(fit_with, link, large)
        link = _with_solved_latency(fit_with, link, small)
    return fit_with(link)


def _with_solved_rate(fit_with: Callable[[Link], Fit], link: Link, large: Sequence[Point]) -> Link:
    if not large:
        return link
    return with_rate(link, _solved(lambda rate: fit_with(with_rate(link, rate)), large, _RATE_RANGE, -1))


def _with_solved_latency(fit_with: Callable[[Link], Fit], link: Link, small: Sequence[Point]) -> Link:
    """By rings and trees: switches that add have a latency of their own, which is a constant."""
    if not small:
        return link
    plain = replace(link, nvls=False, sharp=False)
    latency_s = _solved(lambda one_s: fit_with(replace(plain, latency_s=one_s)), small, _LATENCY_RANGE_S, 1)
    return replace(link, latency_s=latency_s)


def fit_two_levels(sweep: Sweep, node: Link, network: Link, *, node_is_known: bool) -> Fit:
    """Both links of a sweep over nodes with several ranks each; levels stream at the same time.

    A known node link stays, unless the sweep is faster than it allows. One that is not known is as fast as it must be
    at least, and so is the network beside it.
    """
    large, small = large_points(sweep), small_points(sweep)
    network = replace(network, pipelined=True)
    for _ in range(_ROUNDS):
        if large:
            node, network = _two_rates(sweep, node, network, large, node_is_known=node_is_known)
        if small:
            node, network = _two_latencies(sweep, node, network, small, node_is_known=node_is_known)
    return _two_link_fit(sweep, node, network)


def _two_link_fit(sweep: Sweep, node: Link, network: Link) -> Fit:
    large, small = large_points(sweep), small_points(sweep)
    return Fit(sweep=sweep, node=node, network=network, latency=bool(small), bandwidth=bool(large))


def _two_rates(
    sweep: Sweep, node: Link, network: Link, large: Sequence[Point], *, node_is_known: bool
) -> tuple[Link, Link]:
    free_node, free_network = with_rate(node, _UNLIMITED), with_rate(network, _UNLIMITED)
    found = _with_solved_rate(lambda link: _two_link_fit(sweep, free_node, link), network, large)
    if node_is_known and _off(_two_link_fit(sweep, node, free_network), large) <= 0:
        return node, found
    return _with_solved_rate(lambda link: _two_link_fit(sweep, link, free_network), node, large), found


def _two_latencies(
    sweep: Sweep, node: Link, network: Link, small: Sequence[Point], *, node_is_known: bool
) -> tuple[Link, Link]:
    """The network's beside a known one; both in the usual ratio where a hop between nodes would take no longer."""
    if node_is_known:  # switches that add inside may be what small messages use as well
        found = _with_solved_latency(lambda link: _two_link_fit(sweep, node, link), network, small)
        if abs(_off(_two_link_fit(sweep, node, found), small)) < _SOLVED:
            return node, found
    plain = replace(node, nvls=False)
    if node_is_known:
        found = _with_solved_latency(lambda link: _two_link_fit(sweep, plain, link), network, small)
        if found.latency_s >= node.latency_s:
            return node, found
    ratio = USUAL_NODE_LATENCY_S / USUAL_NETWORK_LATENCY_S

    def scaled(far: Link) -> Fit:
        return _two_link_fit(sweep, replace(plain, latency_s=far.latency_s * ratio), far)

    found = _with_solved_latency(scaled, network, small)
    return replace(node, latency_s=found.latency_s * ratio), found


def with_rate(link: Link, reached_bytes_per_s: float) -> Link:
    """The link with a fraction that reaches this rate."""
    return replace(link, fraction=reached_bytes_per_s / link.bytes_per_s)


def _residual(fit: Fit) -> float:
    return median(abs(math.log(fit.ratio(point))) for point in fit.sweep.points)


def _off(fit: Fit, points: Sequence[Point]) -> float:
    """Median logarithm of predicted / measured."""
    return median(math.log(fit.ratio(point)) for point in points)


def _solved(
    fit_of: Callable[[float], Fit], points: Sequence[Point], between: tuple[float, float], direction: int
) -> float:
    """The number at which predicted and measured agree; predictions grow (`direction` 1) or fall (-1) with it."""
    low, high = map(math.log, between)
    for _ in range(50):
        middle = (low + high) / 2
        if direction * _off(fit_of(math.exp(middle)), points) < 0:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)
