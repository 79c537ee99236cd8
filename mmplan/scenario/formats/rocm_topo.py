"""`rocm-smi --showtopo` and `amd-smi topology` (also `--json`) for `mmplan import`: GPUs by Infinity Fabric or PCIe.

Infinity Fabric joins GPUs by direct links, so a group of n reaches n - 1 of a GPU's links. Rates of a link in one
direction, by AMD's data sheets: MI300X 64 GB/s (128 both ways), MI250X 50, MI210 50, MI100 46 (92 both ways).
"""

import re
from collections.abc import Sequence
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.catalogue import catalogue_link
from mmplan.scenario.document import counted
from mmplan.scenario.formats.accelerators import Chip, chips_named
from mmplan.scenario.formats.nvlink_mesh import islands, spread
from mmplan.scenario.formats.reading import UNKNOWN_DEVICE, Head, Reading, read_lines
from mmplan.scenario.formats.rocm_json import read_rocm_json
from mmplan.scenario.formats.rocm_matrix import RocmTopology, read_rocm
from mmplan.scenario.formats.topo_links import SOCKET_BYTES_PER_S, NodeLink
from mmplan.scenario.formats.topo_matrix import untagged
from mmplan.units import format_bytes_per_s

_MARK = re.compile(r"between two GPUs|\(Topology\) Numa|^(?:LINK TYPE|WEIGHT|HOPS) TABLE:", re.MULTILINE)
_JSON = re.compile(r"\s*\[\s*\{\s*\"gpu\":\s*\d+,\s*\"bdf\":[^{}\[\]]{1,200},\s*\"links\":\s*\[")
_LINK_BYTES_PER_S = {"MI325X": 64e9, "MI300X": 64e9, "MI250X": 50e9}
_SLOWEST_BYTES_PER_S, _FULL_MESH_OF_8_BYTES_PER_S = 46e9, 64e9  # MI100; eight in a full mesh are of the MI300 kind
_HOPS_ACROSS_SOCKETS = 3
MOST_HOSTS = 64


def looks_like_rocm_topo(head: Head) -> bool:
    """A title or a line of these tools, or the JSON of amd-smi."""
    return _MARK.search(head.text) is not None or _JSON.match(head.text) is not None


def read_rocm_topo(paths: Sequence[Path]) -> Reading:
    """The node whose matrices stand in the files; equal files are equal nodes.

    Raises:
        InputError: no matrix, a damaged row, or unlike nodes.
    """
    found: list[RocmTopology] = []
    lines: list[str] = []
    for path in paths:
        own = list(read_lines(path))
        if _JSON.match("\n".join(own[:20])) is not None:
            found.append(read_rocm_json(path))
            continue
        for stream in _streams(own):
            found += read_rocm(stream, path)
        lines += own
    first = found[0]
    for other in found[1:]:
        if (other.gpus, dict(other.types)) != (first.gpus, dict(first.types)):
            told = f"another topology than that in line {first.line} of {first.file.name}"
            raise InputError(f"{told}: import unlike nodes one by one", file=other.file, line=other.line)
    chips, others = chips_named(lines)
    chip = chips[0] if len(chips) == 1 and not others else None
    return _reading(first, len(found), chip, [*(one.name for one in chips), *others])


def _streams(lines: Sequence[str]) -> list[list[str]]:
    """The lines of each host that tags its own, blank where a line is another's; all lines where none is tagged."""
    tagged = [untagged(line) for line in lines]
    tags = dict.fromkeys(tag for tag, rest in tagged if _MARK.search(rest))
    if len(tags) > MOST_HOSTS:
        raise InputError(f"matrices under {len(tags)} tags; at most {MOST_HOSTS} hosts are read at a time")
    if not tags or list(tags) == [""]:
        return [list(lines)]
    return [[rest if tag == one else "" for tag, rest in tagged] for one in tags]


def _reading(topology: RocmTopology, nodes: int, chip: Chip | None, names: Sequence[str]) -> Reading:
    size = len(topology.gpus)
    link = _node_link(topology, chip)
    cluster: dict[str, object] = {}
    warnings = list(link.warnings)
    devices = size
    if chip is not None and chip.device is not None:
        cluster["device"] = chip.device
        if chip.name == "MI250X" and size % 2 == 0:
            devices = size // 2
            warnings.append(f"the {size} GPUs are dies: mmplan's mi250x has two, so the node has {devices} devices")
    else:
        said = f"the catalogue has no {', '.join(names[:4])}: write cluster.device" if names else UNKNOWN_DEVICE
        warnings.append(said)
    if nodes > 1:
        cluster["nodes"] = nodes
    cluster["devices_per_node"] = devices
    if link.value is not None and devices == size:
        cluster["node_link"] = link.value
    warnings += _numa_warnings(topology)
    read = (f"{counted(nodes, 'host')} of {counted(size, 'GPU')}{_numa_told(topology)}", *link.read)
    return Reading(
        kind="rocm-topo",
        fragment={"cluster": cluster},
        read=read,
        ignored=(*link.ignored, *topology.cut),
        warnings=tuple(warnings),
    )


def _node_link(topology: RocmTopology, chip: Chip | None) -> NodeLink:
    size = len(topology.gpus)
    pairs = size * (size - 1) // 2
    if size == 1:
        return NodeLink(value=None, read=("one GPU: no link inside the node",))
    if len(topology.types) < pairs:
        told = "the text has no matrix of link types" if not topology.types else "some pair of GPUs is in no whole row"
        return NodeLink(value=None, warnings=(f"{told}: node_link is left out, the device's usual one would be taken",))
    unknown = sum(1 for kind in topology.types.values() if kind == "?")
    if unknown:
        told = f"the tool could not tell the link of {unknown} of {counted(pairs, 'pair')}"
        return NodeLink(
            value=None,
            warnings=(f"{told} (GPUs may be partitions of one device): node_link is left out; write it",),
        )
    counts = {
        (i, j): int(topology.types[min(i, j), max(i, j)] == "XGMI" and _hops(topology, i, j) <= 1)
        for i in range(size)
        for j in range(size)
        if i != j
    }
    links, shares = spread(counts, size) if size > 1 else (0, 1)
    if links:
        return _fabric(counts, links, shares, size, chip)
    return _pcie(topology, counts, size, chip)


def _hops(topology: RocmTopology, i: int, j: int) -> int:
    return topology.hops.get((min(i, j), max(i, j)), 1)


def _fabric(counts: dict[tuple[int, int], int], links: int, shares: int, size: int, chip: Chip | None) -> NodeLink:
    full = min(counts.values()) == 1
    if full:
        links, shares = size - 1, size - 1  # every pair has its own link
    rate = _LINK_BYTES_PER_S.get(chip.name) if chip is not None else None
    warnings = []
    if rate is None:
        rate = _FULL_MESH_OF_8_BYTES_PER_S if full and size == 8 else _SLOWEST_BYTES_PER_S
        warnings.append(f"{format_bytes_per_s(rate)} a link is the least of what such machines have")
    told = (
        f"{links} direct Infinity Fabric links a GPU of {format_bytes_per_s(rate)} = {format_bytes_per_s(links * rate)}"
    )
    if not full:
        told += f"; a group of n neighbours is priced with (n - 1)/{shares} of it"
        warnings.append("some pairs of GPUs are more than one hop apart: messages between these are slower than priced")
    value: dict[str, object] = {"link": "infinity-fabric3", "direct_peers": shares, "source": told}
    if abs(links * rate / catalogue_link("infinity-fabric3").bytes_per_s - 1) > 1e-6:
        value["bandwidth"] = f"{links * rate / 1e9:.6g} GB/s"
    return NodeLink(value=value, read=(told,), warnings=tuple(warnings))


def _pcie(topology: RocmTopology, counts: dict[tuple[int, int], int], size: int, chip: Chip | None) -> NodeLink:
    base = "pcie5" if chip is not None and chip.name in ("MI300X", "MI325X") else "pcie3"
    far = [hops for hops in topology.hops.values() if hops >= _HOPS_ACROSS_SOCKETS]
    told = f"GPUs are joined over PCIe: {base}"
    value: str | dict[str, object] = base
    warnings = [] if chip is not None else ["the slowest generation of PCIe (pcie3) is taken; write pcie4 or pcie5"]
    if far:
        told += f", {max(far)} hops across sockets: {format_bytes_per_s(SOCKET_BYTES_PER_S)}"
        source = f"{max(far)} hops between GPUs: NCCL 2.18 src/graph/topo.h, SKL_QPI_BW"
        value = {"link": base, "bandwidth": f"{SOCKET_BYTES_PER_S / 1e9:.6g} GB/s", "source": source}
    groups = [group for group in islands(counts, size) if len(group) > 1]
    if groups:
        shown = ", ".join("-".join(str(gpu) for gpu in group) for group in groups[:4])
        warnings.append(
            f"Infinity Fabric joins only {counted(len(groups), 'group')} of GPUs ({shown}): priced over PCIe throughout"
            "; for one node alone, write the groups as nodes, their fabric as node_link and PCIe as network"
        )
    elif size > 1:
        warnings.append("no Infinity Fabric between any two GPUs: if there is a bridge, the driver does not see it")
    return NodeLink(value=value, read=(told,), warnings=tuple(warnings))


def _numa_told(topology: RocmTopology) -> str:
    nodes = sorted(set(topology.numa.values()))
    if len(nodes) < 2:
        return ""
    counts = [sum(1 for node in topology.numa.values() if node == one) for one in nodes]
    return f", {'+'.join(map(str, counts))} on NUMA nodes {', '.join(map(str, nodes))}"


def _numa_warnings(topology: RocmTopology) -> list[str]:
    unlike = [gpu for gpu, node in topology.numa.items() if topology.affinity.get(gpu, node) != node]
    if not unlike:
        return []
    return [f"{counted(len(unlike), 'GPU')} (GPU{unlike[0]} first) have another NUMA affinity than their NUMA node"]
