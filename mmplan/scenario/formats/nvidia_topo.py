"""`nvidia-smi topo -m` for `mmplan import`: devices per node, their links and their NICs, of one host or of several.

Hosts with equal matrices are nodes of one kind, unlike ones become pools. Look-alikes (peer-to-peer matrices, other
makers' tools) are named and refused, but for MetaX, whose mx-smi prints the same form.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.catalogue import catalogue_device
from mmplan.scenario.document import counted
from mmplan.scenario.formats.accelerators import Chip, chip_of, chips_named
from mmplan.scenario.formats.reading import UNKNOWN_DEVICE, Head, Reading, device_told_once, read_lines
from mmplan.scenario.formats.topo_links import NodeLink, gpu_pairs, node_link
from mmplan.scenario.formats.topo_matrix import P2P_ROW, Matrix, find_matrices
from mmplan.scenario.formats.topo_nics import Nics, nics_of

MOST_POOLS = 3

_MATRIX = re.compile(
    r"(?<!\S)GPU\d{1,4}[ \t|]+(?:GPU\d{1,4}(?!\S)|NIC0|mlx\d|CPU +Affinity)|GPU0GPU1|GPU0CPU Affinity"
    r"|(?<!\S)MIG \d+/\d+\s+MIG \d+/\d+"
)
_MIG = re.compile(r"^\s*MIG \d+[cg]\.\S+\s+Device|\(UUID: MIG-", re.MULTILINE)
_WITHOUT_NVLINKS = re.compile(r"nvidia-smi\s+topo\s+-mp\b")
_LEGEND = re.compile(r"^\s*NV#\s+= Connection traversing|^\s*SYS\s+= Connection traversing", re.MULTILINE)
_OTHERS = (
    (re.compile(r"(?<!\S)NPU0\s+NPU1(?!\S)|\bNPU\s*0\b.*\bHCCS\b"), "this is a topology of Ascend devices (npu-smi)"),
    (re.compile(r"(?<!\S)GPU 0/0\s+GPU "), "this is a topology of Intel devices (xpu-smi)"),
    (re.compile(r"(?<!\S)MIG \d+/\d+\s+MIG \d+/\d+"), "this is a matrix of MIG instances, which no link joins"),
    (re.compile(r"(?<!\S)CARD ?0\s+CARD ?1(?!\S)|(?<!\S)MLU0\s+MLU1"), "this is a topology of another maker's devices"),
)


def looks_like_nvidia_topo(head: Head) -> bool:
    """A row of column names of GPUs, or the legend of such a matrix."""
    return _MATRIX.search(head.text) is not None or _LEGEND.search(head.text) is not None


def read_nvidia_topo(paths: Sequence[Path], device: str | None = None) -> Reading:
    """The nodes whose matrices stand in the files.

    Args:
        device: the catalogue's device that files beside them name, for texts that name none.

    Raises:
        InputError: no matrix, no whole row, a damaged row, columns run together, another tool's matrix, or more kinds
            of nodes than a cluster has pools.
    """
    matrices: list[Matrix] = []
    chips: dict[Path, Chip | None] = {}
    warnings: list[str] = []
    beside: list[str] = []
    for path in paths:
        lines = list(read_lines(path))
        found = find_matrices(lines, path)
        if not found:
            raise _no_matrix(lines, path)
        matrices += found
        if any(P2P_ROW.match(line) for line in lines):
            beside.append(f"a matrix of 'topo -p2p' in {path.name}: it says no links")
        chips[path], odd = _chip(lines, chip_of(device))
        warnings += odd
    whole, cut = _whole_and_cut(matrices)
    kinds: dict[tuple[object, ...], list[Matrix]] = {}
    for matrix in whole:
        kinds.setdefault((_kind(matrix), chips[matrix.file]), []).append(matrix)
    if len(kinds) > MOST_POOLS:
        raise InputError(f"{len(kinds)} kinds of nodes; a cluster has at most {MOST_POOLS} pools", file=paths[0])
    ignored = [_cut_off(matrix, whole) for matrix in cut]
    pools = [_pool(group, chips[group[0].file]) for group in kinds.values()]
    read = [sentence for _, told, _ in pools for sentence in told]
    warnings += [sentence for _, _, told in pools for sentence in told]
    warnings += _numbers_of_nodes(list(kinds.values()))
    return Reading(
        kind="nvidia-topo",
        fragment={"cluster": _cluster([pool for pool, _, _ in pools])},
        read=tuple(dict.fromkeys(read)),
        ignored=(*ignored, *beside),
        warnings=device_told_once(warnings),
    )


def _no_matrix(lines: Sequence[str], path: Path) -> InputError:
    for number, line in enumerate(lines, start=1):
        for pattern, told in _OTHERS:
            if pattern.search(line[:2000]):
                return InputError(f"{told}; expected 'nvidia-smi topo -m'", file=path, line=number)
        if _LEGEND.search(line):
            return InputError("the legend of a matrix without the matrix", file=path, line=number)
    return InputError("found no matrix of 'nvidia-smi topo -m' (a line GPU0 GPU1 ... and rows below it)", file=path)


def _whole_and_cut(matrices: Sequence[Matrix]) -> tuple[list[Matrix], list[Matrix]]:
    """Matrices in which every pair of GPUs stands; where there is none of these, those with any whole row.

    Raises:
        InputError: no matrix has a whole row.
    """
    rows = [matrix for matrix in matrices if any(gpu in matrix.cells for gpu in matrix.gpus)]
    if not rows:
        first = matrices[0]
        raise InputError(f"a matrix without a whole row of a GPU: {first.cut}", file=first.file, line=first.line)
    whole = [matrix for matrix in rows if not gpu_pairs(matrix)[1]] or rows
    return whole, [matrix for matrix in matrices if matrix not in whole]


def _kind(matrix: Matrix) -> tuple[object, ...]:
    """Equal for hosts that are built alike: links between GPUs, and from GPUs to NICs."""
    pairs = tuple(sorted(gpu_pairs(matrix)[0].items()))
    nics = tuple(matrix.link(gpu, nic) for gpu in matrix.gpus for nic in matrix.nics)
    return matrix.gpus, pairs, len(matrix.nics), nics


def _chip(lines: Sequence[str], beside: Chip | None) -> tuple[Chip | None, list[str]]:
    """The one chip that the text names, or the one `beside` it, and what is odd about the text."""
    chips, others = chips_named(lines)
    odd: list[str] = []
    if any(_WITHOUT_NVLINKS.search(line[:2000]) for line in lines):
        odd.append("'topo -mp' leaves NVLinks out: 'nvidia-smi topo -m' shows them")
    if (instances := sum(_MIG.search(line[:2000]) is not None for line in lines)) > 0:
        odd.append(
            f"the GPUs are cut into MIG instances ({instances} are listed): a process sees a part of one GPU's memory, "
            "and no NVLink; this reading is of whole GPUs"
        )
    if len(chips) == 1 and not others:
        return chips[0], odd
    if chips:
        names = [*(chip.name for chip in chips), *others]
        odd.append(f"the text names several devices ({', '.join(names[:6])}): none is taken")
    elif others:
        odd.append(f"no catalogue device for {', '.join(others[:3])}")
    else:
        return beside, odd
    return None, odd


def _pool(group: Sequence[Matrix], chip: Chip | None) -> tuple[dict[str, object], list[str], list[str]]:
    """Keys of a pool, what was read, and warnings, of hosts that are alike."""
    matrix = group[0]
    pairs, unknown, differences = gpu_pairs(matrix)
    link: NodeLink = node_link(matrix, pairs, unknown, chip)
    usual = catalogue_device(chip.device).network if chip is not None and chip.device is not None else None
    nics: Nics = nics_of(matrix, usual)
    pool: dict[str, object] = {}
    if chip is not None and chip.device is not None:
        pool["device"] = chip.device
    if len(group) > 1:
        pool["nodes"] = len(group)
    pool["devices_per_node"] = len(matrix.gpus)
    if link.value is not None:
        pool["node_link"] = link.value
    if nics.network is not None:
        pool["network"] = nics.network
    hosts = f"{counted(len(group), 'host')} of {counted(len(matrix.gpus), 'GPU')}"
    numa = dict.fromkeys(matrix.numa.values())
    read = [f"{hosts}{_numa(matrix, list(numa))}", *link.read, *nics.read]
    warnings = [f"the matrix is not symmetric: {text}; the slower one is taken" for text in differences[:3]]
    if matrix.cut:
        warnings.append(
            f"{matrix.cut}: links of what is missing are read off the rows of the others, as far as these go"
        )
    if matrix.gpus[0] != "GPU0":
        warnings.append(
            f"the matrix begins at {matrix.gpus[0]}: the {len(matrix.gpus)} GPUs that it shows are taken as the node"
        )
    if chip is None:
        warnings.append(UNKNOWN_DEVICE)
    elif chip.device is None:
        warnings.append(f"the catalogue has no {chip.name}: write cluster.device")
    if chip is not None and chip.name in ("GB200", "GB300"):
        warnings.append("NVLinks of GB200 and GB300 NVL72 join 18 such nodes: write a rack as one node of 72 devices")
    warnings += [*link.warnings, *nics.warnings, *_hidden(matrix, chip)]
    return pool, read, warnings


def _numa(matrix: Matrix, nodes: Sequence[str]) -> str:
    if len(nodes) < 2:
        return ""
    counts = [sum(1 for numa in matrix.numa.values() if numa == node) for node in nodes]
    return f", {'+'.join(str(count) for count in counts)} on NUMA nodes {', '.join(nodes)}"


def _hidden(matrix: Matrix, chip: Chip | None) -> list[str]:
    """GPUs that all see each other across sockets while each has a NIC of its own."""
    links = {matrix.link(a, b) for a in matrix.gpus for b in matrix.gpus if a != b}
    if len(matrix.gpus) >= 4 and links in ({"SYS"}, {"PHB"}) and len(matrix.nics) >= len(matrix.gpus) and chip is None:
        told = f"{len(matrix.gpus)} GPUs with a NIC each, and {links.pop()} between any two"
        return [f"{told}: a virtual machine may hide their NVLinks; check with nvidia-smi nvlink --status"]
    return []


def _numbers_of_nodes(kinds: Sequence[Sequence[Matrix]]) -> list[str]:
    warnings = []
    for group in kinds:
        hosts = [matrix.host for matrix in group if matrix.host]
        if len(group) > 1 and len(set(hosts)) < len(group):
            warnings.append(
                f"{len(group)} equal matrices are taken as so many nodes; if they are of one host, write nodes: 1"
            )
    return warnings


def _cut_off(matrix: Matrix, whole: Sequence[Matrix]) -> str:
    host = f" of {matrix.host}" if matrix.host else ""
    alike = any(matrix.gpus == other.gpus and matrix.nics == other.nics for other in whole)
    same = "; its columns are those of a whole one, so there may be one node more" if alike else ""
    return f"the matrix{host} in line {matrix.line}: {matrix.cut}{same}"


def _cluster(pools: Sequence[dict[str, object]]) -> dict[str, object]:
    """One kind of nodes as it is, several as pools with the slowest network of theirs."""
    if len(pools) == 1:
        return pools[0]
    networks = [pool["network"] for pool in pools if "network" in pool]
    cluster: dict[str, object] = {"pools": [{k: v for k, v in pool.items() if k != "network"} for pool in pools]}
    if networks:
        cluster["network"] = networks[0]
    return cluster
