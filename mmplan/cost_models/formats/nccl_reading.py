"""nccl-tests and rccl-tests logs for `mmplan import`: the links of a cluster as its collectives show them.

A table whose nodes are known gives `node_link`, or `network` (one device's share of the ports). Where the text does not
say how ranks lie on nodes, alpha and beta of its collective are recorded without a link.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mmplan.cost_models.formats.nccl_fit import (
    EXCHANGES,
    MOST_RING_FRACTION,
    PRICED,
    USUAL_NETWORK_LATENCY_S,
    USUAL_NODE_LATENCY_S,
    Fit,
    fit_one_level,
    group_of_sweep,
    large_points,
    plain_fit,
    small_points,
)
from mmplan.cost_models.formats.nccl_json import is_nccl_json, runs_of_json
from mmplan.cost_models.formats.nccl_log import Run, read_runs
from mmplan.cost_models.formats.nccl_network import inside_is_slower, joined, network_of
from mmplan.cost_models.formats.nccl_rows import Row, read_row
from mmplan.cost_models.formats.nccl_shape import shape_of
from mmplan.cost_models.formats.nccl_sweep import Sweep, sweep_of
from mmplan.errors import InputError
from mmplan.scenario.catalogue import catalogue_device, catalogue_link, link_names
from mmplan.scenario.cluster import Link
from mmplan.scenario.document import counted
from mmplan.scenario.formats.accelerators import Chip, chip_of, chips_named
from mmplan.scenario.formats.reading import UNKNOWN_DEVICE, Head, Reading, read_lines
from mmplan.units import format_bytes, format_bytes_per_s, format_seconds, parse_bytes_per_s

MOST_SWEEPS = 200

_MARK = re.compile(
    r"\b(?:size +count|bytes +N) +type\b.*\bbusbw|\bnThread +\d+ +nGpus +\d+|Collective test starting|"
    r"\b(?:all_reduce|all_gather|reduce_scatter|alltoallv?|broadcast|reduce|sendrecv|gather|scatter|hypercube)_perf\b|"
    r"\b(?:all_reduce|all_gather|reduce_scatter|alltoall|broadcast|reduce|sendrecv)_perf_mpi\b|\"bus_?bw\"\s*:"
)
_ROUNDING = 1.03


def looks_like_nccl(head: Head) -> bool:
    """Titles, parameters or the program of such a log, or two rows of its table."""
    if _MARK.search(head.text) is not None:
        return True
    rows = 0
    for line in head.text.splitlines():
        rows += isinstance(read_row(line, 0), Row)
        if rows == 2:
            return True
    return False


def read_nccl(paths: Sequence[Path], hosts: Mapping[str, object] | None = None, device: str | None = None) -> Reading:
    """The links that the tables of the files show.

    Args:
        hosts: `nodes` and `devices_per_node` of a host list beside them, for tables that do not say how ranks lie.
        device: the catalogue's device that files beside them name, for tables that name none.

    Raises:
        InputError: no table, or none that can be used: the reason of the first one.
    """
    sweeps, ignored = _sweeps([run for path in paths for run in _runs(path)], paths[0])
    _refuse_unlike_machines(sweeps)
    sweeps = [_placed(sweep, hosts or {}) for sweep in sweeps]
    chip, named = _chip(sweeps, chip_of(device))
    for sweep in sweeps:
        _refuse_impossible(sweep, chip)
    read: list[str] = []
    warnings = list(named)
    for sweep in sweeps:
        told, odd = shape_of(sweep)
        read += [_described(sweep, len(paths) > 1), *(f"{_name(sweep)}: {text}" for text in (*sweep.notes, *told))]
        warnings += [f"{_name(sweep)}: {text}" for text in (*sweep.warnings, *odd)]
        ignored += [f"{_name(sweep)}: {text}" for text in sweep.left_out]
    priced = [sweep for sweep in sweeps if sweep.nodes is not None and sweep.collective in PRICED]
    priced = [sweep for sweep in priced if small_points(sweep) or large_points(sweep)]
    if not priced:
        return _record(sweeps, read, ignored, warnings)
    ignored += [f"{_name(sweep)}: {_why_not_priced(sweep)}" for sweep in sweeps if sweep not in priced]
    cluster, told = _cluster(priced, chip)
    warnings += _faster_than_ports(cluster, priced, chip)
    if 1 in _per_node([sweep for sweep in priced if sweep.nodes != 1]):
        warnings.append("one rank a node ran: where devices of a node share its port, divide the network's bandwidth")
    return Reading(
        kind="nccl",
        fragment={"cluster": cluster},
        read=(*read, *told),
        ignored=tuple(dict.fromkeys(ignored)),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _runs(path: Path) -> list[Run]:
    lines = list(read_lines(path))
    return runs_of_json(lines, path) if is_nccl_json(lines) else read_runs(lines, path)


def _faster_than_ports(cluster: Mapping[str, object], sweeps: Sequence[Sweep], chip: Chip | None) -> list[str]:
    """A network that no port of the device reaches: nodes that share NVLinks (GB200 NVL72) are one node to mmplan."""
    network = cluster.get("network")
    if chip is None or chip.device is None or not isinstance(network, dict) or "bandwidth" not in network:
        return []
    port = _port(chip)
    rate = parse_bytes_per_s(str(network["bandwidth"]))
    if rate <= port * _ROUNDING:
        return []
    most = max(sweep.ranks[0] for sweep in sweeps)
    told = f"{format_bytes_per_s(rate)} a device between nodes is more than its port has ({format_bytes_per_s(port)})"
    return [f"{told}: if NVLinks join the nodes (NVL72), write nodes: 1, devices_per_node: {most} and their node_link"]


def _sweeps(runs: Sequence[Run], path: Path) -> tuple[list[Sweep], list[str]]:
    """Runs that can be used, and why others cannot."""
    port = _port(None)
    sweeps: list[Sweep] = []
    refused: list[InputError] = []
    for run in runs:
        if not (run.rows or run.damaged or run.titles or run.failures or run.ranks):
            continue
        try:
            sweeps.append(sweep_of(run, port))
        except InputError as error:
            refused.append(error)
    alone = [error for error in refused if error.message.startswith("one rank")]
    if not sweeps and len(alone) > 1:
        message = f"{len(alone)} tables of one rank each: build nccl-tests with MPI=1 and start it with mpirun"
        raise InputError(message, file=alone[1].file, line=alone[1].line)
    if not sweeps:
        raise refused[0] if refused else InputError("found no table of nccl-tests or rccl-tests", file=path)
    if len(sweeps) > MOST_SWEEPS:
        raise InputError(f"{len(sweeps)} tables; at most {MOST_SWEEPS} are read at a time", file=path)
    return sweeps, [f"the table from line {error.line}: {error.message}" for error in refused[:10]]


def _placed(sweep: Sweep, hosts: Mapping[str, object]) -> Sweep:
    """The sweep on as many nodes as a host list gives its ranks, where nothing else says it."""
    nodes, slots = hosts.get("nodes"), hosts.get("devices_per_node")
    low, high = sweep.ranks
    if sweep.nodes is not None or low != high or not isinstance(nodes, int):
        return sweep
    used = low // slots if isinstance(slots, int) and low % slots == 0 else nodes
    if used > nodes or low % used:
        each = f" with {counted(slots, 'slot')} each" if isinstance(slots, int) else ""
        odd = f"its {low} ranks do not fill whole hosts of the {counted(nodes, 'host')}{each} beside it"
        return replace(sweep, warnings=(*sweep.warnings, odd))
    return replace(sweep, nodes=used, why_nodes=f"by the list of {counted(nodes, 'host')} beside it")


def _port(chip: Chip | None) -> float:
    """Bytes/s of the device's port, or of the fastest one of the catalogue."""
    if chip is not None and chip.device is not None:
        return catalogue_link(catalogue_device(chip.device).network).bytes_per_s
    return max(
        catalogue_link(name).bytes_per_s for name in link_names() if "nvlink" not in name and "fabric" not in name
    )


def _chip(sweeps: Sequence[Sweep], beside: Chip | None) -> tuple[Chip | None, list[str]]:
    names = list(dict.fromkeys(name for sweep in sweeps for name in sweep.names))
    chips, others = chips_named(names)
    if len(chips) == 1 and not others:
        chip = chips[0]
        return chip, [] if chip.device else [f"the catalogue has no {chip.name}: write cluster.device"]
    if chips or others:
        told = ", ".join([*(chip.name for chip in chips), *others][:5])
        return None, [f"no one device of the catalogue ({told}): write cluster.device"]
    return beside, [] if beside is not None else [UNKNOWN_DEVICE]


def _refuse_unlike_machines(sweeps: Sequence[Sweep]) -> None:
    """Tables whose lists of devices share no device are not of one cluster."""
    named = [(sweep, frozenset(chip.name for chip in chips_named(sweep.names)[0])) for sweep in sweeps]
    named = [(sweep, chips) for sweep, chips in named if chips]
    for sweep, chips in named[1:]:
        if not chips & named[0][1]:
            first = f"{', '.join(sorted(named[0][1]))} ({named[0][0].run.file.name})"
            told = f"this table is of {', '.join(sorted(chips))}, another of {first}: import each machine's files alone"
            raise InputError(told, file=sweep.run.file, line=sweep.run.line)


def _usual_node_link(chip: Chip | None) -> tuple[str, Link] | None:
    if chip is None or chip.device is None:
        return None
    name = catalogue_device(chip.device).node_link
    return name, catalogue_link(name)


def _refuse_impossible(sweep: Sweep, chip: Chip | None) -> None:
    """Rates that no link of the machine has: inside a node its own link, else the fastest of the catalogue."""
    usual = _usual_node_link(chip) if sweep.nodes == 1 else None
    links = [usual[1]] if usual else [catalogue_link(name) for name in link_names()]
    fastest = max(link.bytes_per_s for link in links)
    if chip is not None:  # some devices can be joined by bridges, which their usual link is not
        fastest = max(fastest, chip.nvlinks * chip.nvlink_bytes_per_s)
    switched = sweep.collective in (None, "all_reduce", "all_reduce_bias") and any(link.nvls for link in links)
    most = fastest * _ROUNDING * (max(1.0, sweep.factor) if switched else 1.0)
    for point in sweep.points:
        rate = sweep.factor * point.size_bytes / point.time_s
        if rate > most:
            of = f"the links of {chip.name} have" if usual and chip else "the fastest link of the catalogue has"
            told = f"busbw {format_bytes_per_s(rate)} is more than {of}: {format_bytes_per_s(fastest)} a direction"
            raise InputError(told, file=sweep.run.file, line=point.line)


def _cluster(sweeps: Sequence[Sweep], chip: Chip | None) -> tuple[dict[str, object], list[str]]:
    """The links of `cluster`, and sentences on how well they predict the tables."""
    usual = _usual_node_link(chip)
    base = usual[1] if usual else Link(bytes_per_s=1e11, latency_s=USUAL_NODE_LATENCY_S, fraction=1.0, source="")
    far = Link(bytes_per_s=1e10, latency_s=USUAL_NETWORK_LATENCY_S, fraction=1.0, source="")
    inside = [sweep for sweep in sweeps if sweep.nodes == 1]
    across = [sweep for sweep in sweeps if sweep.nodes != 1]
    cluster: dict[str, object] = {}
    if chip is not None and chip.device is not None:
        cluster["device"] = chip.device
    told: list[str] = []
    node, network = None, None
    fits = [fit_one_level(sweep, _with_switch(sweep, base, chip), network=False) for sweep in inside]
    if fits:
        node = joined([(fit, fit.node) for fit in fits if fit.node is not None])
    if across:
        known, port_bytes_per_s = node is not None or usual is not None, _port(chip)
        found = network_of(across, node or base, far, node_is_known=known, port_bytes_per_s=port_bytes_per_s)
        network, node = found.link, found.node or node
        told += found.told
        if found.node is not None:
            told.append("node_link is as quick as tables over nodes need it at least: no table shows it alone")
    if node is not None and (value := _node_value(node, usual[0] if usual else None, inside or across)):
        cluster["node_link"] = value
    port = catalogue_device(chip.device).network if chip is not None and chip.device is not None else None
    if network is not None and (value := _network_value(network, port, across)):
        cluster["network"] = value
    for sweep in sweeps:
        fit = Fit(sweep=sweep, node=node or base, network=network or far, latency=True, bandwidth=True)
        told.append(f"{_name(sweep)}: {_residuals(fit)}")
        if inside_is_slower(fit):
            told.append(f"{_name(sweep)}: links inside nodes set its pace, so the network may be faster than written")
        alpha_s = plain_fit(sweep)[0]
        if sweep.collective in EXCHANGES and alpha_s is not None:
            exchange = f"the latency of a whole exchange, {format_seconds(alpha_s)}, is no link's and is not taken"
            told.append(f"{_name(sweep)}: {exchange}: small ones are slower than priced")
    told += [f"network is the share of one of {count} ranks of a node" for count in sorted(_per_node(across) - {1})]
    told += _unmeasured("node_link", node or base, inside)
    told += _unmeasured("network", network or far, across)
    return cluster, told


def _per_node(sweeps: Sequence[Sweep]) -> set[int]:
    return {group_of_sweep(sweep).per_node for sweep in sweeps}


def _with_switch(sweep: Sweep, base: Link, chip: Chip | None) -> Link:
    """Of a device that is not named: rates beyond rings of the fourth NVLink are taken to be added by switches."""
    fastest = max(sweep.factor * point.size_bytes / point.time_s for point in sweep.points)
    ring = catalogue_link("nvlink4").bytes_per_s * MOST_RING_FRACTION
    if chip is None and sweep.collective == "all_reduce" and fastest > ring:
        return replace(base, bytes_per_s=catalogue_link("nvlink4").bytes_per_s, nvls=True)
    return base


def _node_value(link: Link, usual: str | None, sweeps: Sequence[Sweep]) -> dict[str, object]:
    """What a scenario takes; empty where neither a table nor a device gives the bandwidth."""
    value: dict[str, object] = {}
    measured = any(large_points(sweep) for sweep in sweeps)
    if usual is not None and (link.fraction <= 1 or not measured):
        value["link"] = usual
        value |= {"fraction": float(f"{link.fraction:.4g}")} if measured else {}
    elif measured:
        value["bandwidth"] = _rate(link)
    else:
        return {}
    return value | _rest(link, usual if "link" in value else None, sweeps)


def _network_value(link: Link, usual: str | None, sweeps: Sequence[Sweep]) -> dict[str, object]:
    """As for the node; the share of a device is written out, as ports are not in the table."""
    if any(large_points(sweep) for sweep in sweeps):
        return {"bandwidth": _rate(link)} | _rest(link, None, sweeps)
    return {"link": usual} | _rest(link, usual, sweeps) if usual is not None else {}


def _rest(link: Link, usual: str | None, sweeps: Sequence[Sweep]) -> dict[str, object]:
    """Latency where it was measured or has to stand, switches where they differ, source."""
    value: dict[str, object] = {}
    if usual is None or any(small_points(sweep) for sweep in sweeps):
        value["latency"] = f"{link.latency_s * 1e6:.4g} us"
    if link.nvls != (usual is not None and catalogue_link(usual).nvls):
        value["nvls"] = link.nvls
    value |= {key: True for key in ("pipelined", "rings") if getattr(link, key)}
    return value | {"source": _source(sweeps)}


def _rate(link: Link) -> str:
    return f"{link.reached_bytes_per_s / 1e9:.5g} GB/s"


def _source(sweeps: Sequence[Sweep]) -> str:
    names = dict.fromkeys(f"{sweep.collective} of {sweep.ranks[0]} ranks" for sweep in sweeps)
    return f"nccl-tests: {', '.join(list(names)[:4])}"


def _unmeasured(where: str, link: Link, sweeps: Sequence[Sweep]) -> list[str]:
    told = []
    if sweeps and not any(small_points(sweep) for sweep in sweeps):
        told.append(f"no table of small messages: the latency of {where} is the usual {format_seconds(link.latency_s)}")
    if sweeps and not any(large_points(sweep) for sweep in sweeps):
        told.append(f"no table of large messages: the bandwidth of {where} is not measured")
    return told


def _residuals(fit: Fit) -> str:
    """Predicted over measured where it was fitted, and at its worst."""
    sweep = fit.sweep
    fitted = [fit.ratio(point) for point in (*small_points(sweep), *large_points(sweep))]
    worst = max(sweep.points, key=lambda point: max(fit.ratio(point), 1 / fit.ratio(point)))
    text = f"predicted / measured {min(fitted):.2f} to {max(fitted):.2f} where it was fitted (small and large messages)"
    return f"{text}, {fit.ratio(worst):.2f} at worst ({format_bytes(worst.size_bytes)})"


def _name(sweep: Sweep) -> str:
    low, high = sweep.ranks
    ranks = f"{low} ranks" if low == high else f"{low} to {high} ranks" if high < 2 * low else "unknown ranks"
    return f"{sweep.collective or 'a collective'} of {ranks}, line {sweep.run.titles_line or sweep.run.line}"


def _described(sweep: Sweep, several_files: bool) -> str:
    sizes = [format_bytes(point.size_bytes) for point in sweep.points]
    where = f" on {counted(sweep.nodes, 'node')} ({sweep.why_nodes})" if sweep.nodes is not None else ""
    file = f" of {sweep.run.file.name}" if several_files else ""
    alpha_s, beta = plain_fit(sweep)
    numbers = [f"alpha {format_seconds(alpha_s)}"] if alpha_s is not None else []
    numbers += [f"beta {format_bytes_per_s(beta)}"] if beta is not None else []
    shown = f": time = alpha + bytes / beta with {', '.join(numbers)}" if numbers else ""
    return f"{_name(sweep)}{file}{where}, {counted(len(sizes), 'size')} from {sizes[0]} to {sizes[-1]}{shown}"


def _why_not_priced(sweep: Sweep) -> str:
    if sweep.collective is None:
        return "its collective is not known, so it gives no link"
    if sweep.collective not in PRICED:
        return f"mmplan prices no {sweep.collective}, so it gives no link"
    if sweep.nodes is None:
        return "the text does not say how its ranks lie on nodes (no list of devices), so it gives no link"
    if sweep.collective in EXCHANGES:
        return "the latency of an exchange is no link's, and its messages are not large enough for a bandwidth"
    return "its messages are neither small enough for a latency nor large enough for a bandwidth"


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _record(sweeps: Sequence[Sweep], read: Sequence[str], ignored: list[str], warnings: list[str]) -> Reading:
    """What was measured, where it is no link of a scenario."""
    rows = []
    for sweep in sweeps:
        alpha_s, beta = plain_fit(sweep)
        low, high = sweep.ranks
        row: dict[str, object] = {"collective": sweep.collective, "ranks": low if high < 2 * low else None}
        if low < high < 2 * low:
            row["most_ranks"] = high
        row |= {"nodes": sweep.nodes, "alpha_s": _short(alpha_s), "beta_bytes_per_s": _short(beta)}
        row |= {"least_bytes": sweep.points[0].size_bytes, "most_bytes": sweep.points[-1].size_bytes}
        rows.append(row)
        warnings.append(f"{_name(sweep)}: {_why_not_priced(sweep)}")
    return Reading(
        kind="nccl",
        fragment={"collectives": rows},
        document="a record of collectives, no part of a scenario",
        read=tuple(read),
        ignored=tuple(dict.fromkeys(ignored)),
        warnings=tuple(dict.fromkeys(warnings)),
    )
