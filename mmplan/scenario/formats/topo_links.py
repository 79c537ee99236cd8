"""From the links of a node's GPUs to its `node_link`: NVLinks by count and chip, PCIe where some pair has no NVLink.

Where the text leaves a choice (a chip that is not named, the generation of PCIe) the slower one is taken and said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmplan.errors import InputError
from mmplan.scenario.catalogue import catalogue_device, catalogue_link
from mmplan.scenario.document import counted
from mmplan.scenario.formats.accelerators import CHIPS, Chip
from mmplan.scenario.formats.nvlink_mesh import islands, spread
from mmplan.scenario.formats.topo_matrix import Matrix
from mmplan.units import format_bytes_per_s

MOST_NVLINKS = 18  # of a device: H100 and B200 white papers
# Between sockets: NCCL 2.18 src/graph/topo.h, SKL_QPI_BW (newer processors reach more).
SOCKET_BYTES_PER_S = 10e9
_PCIE = ("PIX", "PXB", "PHB", "NODE", "SOC", "SYS")  # from near to far
_DIRECT = "nvlink2"  # for its latency and fraction, which are those of all NVLinks
_PCIE_OF = {"volta": "pcie3", "ampere": "pcie4", "ada": "pcie4", "hopper": "pcie5", "blackwell": "pcie5"}

Pairs = Mapping[tuple[int, int], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLink:
    """`value` is what a scenario takes as `node_link`; None where the device's own is right or none can be said."""

    value: str | dict[str, object] | None
    read: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def gpu_pairs(matrix: Matrix) -> tuple[Pairs, list[tuple[str, str]], list[str]]:
    """The link of each pair that a row gives (the slower one where two rows differ), the pairs that no row gives, and
    a sentence for each difference.

    Raises:
        InputError: more NVLinks than any device has.
    """
    pairs: dict[tuple[int, int], str] = {}
    unknown: list[tuple[str, str]] = []
    differences: list[str] = []
    for i, first in enumerate(matrix.gpus):
        for j, second in enumerate(matrix.gpus[:i]):
            found = [matrix.cells[a][b] for a, b in ((first, second), (second, first)) if a in matrix.cells]
            if not found:
                unknown.append((second, first))
                continue
            for label, link in zip((first, second), found, strict=False):
                if link.startswith("NV") and not 1 <= int(link[2:]) <= MOST_NVLINKS:
                    line = matrix.row_lines.get(label, matrix.line)
                    message = f"{link} between {second} and {first}: a device has 1 to {MOST_NVLINKS} NVLinks"
                    raise InputError(message, file=matrix.file, line=line)
            if len(set(found)) > 1:
                lines = f"lines {matrix.row_lines[second]} and {matrix.row_lines[first]}"
                differences.append(f"{second} and {first} are joined by {found[1]} and by {found[0]} ({lines})")
            pairs[j, i] = max(found, key=_slowness)
    return pairs, unknown, differences


def _slowness(link: str) -> tuple[int, int]:
    if link.startswith("NV"):
        return 0, -int(link[2:])
    return (1, 0) if link == "MX" else (2, _PCIE.index(link) if link in _PCIE else len(_PCIE))


def node_link(matrix: Matrix, pairs: Pairs, unknown: Sequence[tuple[str, str]], chip: Chip | None) -> NodeLink:
    """The link inside the node of a matrix whose GPU pairs are `pairs`."""
    size = len(matrix.gpus)
    if size == 1:
        return NodeLink(value=None, read=("one GPU: no link inside the node",))
    counts = {pair: int(link[2:]) if link.startswith("NV") else 0 for pair, link in pairs.items()}
    counts |= {(j, i): count for (i, j), count in counts.items()}
    totals = [sum(counts.get((gpu, other), 0) for other in range(size)) for gpu in range(size)]
    switched = min(counts.values(), default=0) > 0 and _on_a_switch(totals, chip)
    if unknown and not switched:
        told = f"{len(unknown)} of {counted(size * (size - 1) // 2, 'pair')} of GPUs are in no whole row"
        return NodeLink(value=None, warnings=(f"{told}: node_link is left out, the device's usual one would be taken",))
    if any(link in ("MX", "ETH", "NA") for link in pairs.values()):
        return _of_another_maker(pairs, size)
    if switched:
        return _switched(counts, unknown, chip)
    if min(totals) > 0 and len(islands(counts, size)) == 1:
        found = _direct(counts, totals, size, chip)
        if found is not None:
            return found
    return _pcie(pairs, counts, totals, size, chip)


def _on_a_switch(totals: Sequence[int], chip: Chip | None) -> bool:
    """More links to all others together than a device has: they are the same links, through a switch."""
    most = chip.nvlinks if chip is not None and chip.nvlinks else MOST_NVLINKS
    return min(totals) > most


def _candidates(total: int, switched: bool, chip: Chip | None) -> tuple[Chip, ...]:
    """Chips that have `total` NVLinks, or the fewest above; with switches where they are needed."""
    if chip is not None and chip.nvlinks:
        return (chip,)
    known = [one for one in CHIPS if one.nvlinks >= total and (one.switched or not switched)]
    fewest = min(one.nvlinks for one in known)
    return tuple(one for one in known if one.nvlinks == fewest)


def _chip_names(chips: Sequence[Chip]) -> str:
    return ", ".join(dict.fromkeys(chip.name for chip in chips))


def _switched(counts: Mapping[tuple[int, int], int], unknown: Sequence[tuple[str, str]], chip: Chip | None) -> NodeLink:
    """All links of a device reach any other device."""
    count, most = min(counts.values()), max(counts.values())
    chips = _candidates(count, True, chip)
    rate = min(one.nvlink_bytes_per_s for one in chips)
    told = f"{count} NVLinks of {format_bytes_per_s(rate)} through switches = {format_bytes_per_s(count * rate)}"
    warnings = []
    if most > count:
        warnings.append(
            f"GPUs have unlike numbers of NVLinks ({count} to {most}): the fewest count for all; a link may be down"
        )
    if unknown:
        warnings.append(f"{counted(len(unknown), 'pair')} of GPUs in no whole row; all GPUs hang on the switches")
    if chip is None:
        warnings.append(_unnamed(count, chips, rate))
    base = _usual(chips)
    link = catalogue_link(base)
    value: str | dict[str, object] = base
    if abs(link.bytes_per_s / (count * rate) - 1) > 1e-6:
        value = {"link": base, "bandwidth": _bandwidth(count * rate), "source": told}
    return NodeLink(value=value, read=(told,), warnings=tuple(warnings))


def _unnamed(count: int, chips: Sequence[Chip], rate: float) -> str:
    rates = {one.nvlink_bytes_per_s for one in chips}
    slowest = f", of which the slowest NVLink ({format_bytes_per_s(rate)}) is taken" if len(rates) > 1 else ""
    return f"the device is not known: {count} NVLinks are those of {_chip_names(chips)}{slowest}; write cluster.device"


def _nvlinks(chip: Chip) -> tuple[int, float]:
    return chip.nvlinks, chip.nvlink_bytes_per_s


def _usual(chips: Sequence[Chip]) -> str:
    """The catalogue link of the slowest of these chips; without switches that add, where only some have these.

    A chip that is not in the catalogue and hangs on switches has the link of one with the same NVLinks.
    """
    first = chips[0]
    same = [one for one in CHIPS if first.switched and one.switched and _nvlinks(one) == _nvlinks(first)]
    found = [one for one in chips if one.device is not None] or same
    names = [catalogue_device(one.device).node_link for one in found if one.device is not None]
    links = [name for name in names if name.startswith("nvlink")] or ["nvlink2"]
    return min(links, key=lambda name: (catalogue_link(name).nvls, catalogue_link(name).bytes_per_s))


def _direct(
    counts: Mapping[tuple[int, int], int], totals: Sequence[int], size: int, chip: Chip | None
) -> NodeLink | None:
    """Links from device to device; None where neighbours have none, so that small groups would be priced too fast."""
    links, shares = spread(counts, size)
    if not links:
        return None
    chips = _candidates(max(totals), False, chip)
    rate = min(one.nvlink_bytes_per_s for one in chips)
    kinds = sorted({count for count in counts.values() if count})
    told = (
        f"direct NVLinks ({', '.join(f'NV{kind}' for kind in kinds)} between pairs), {format_bytes_per_s(rate)} each: "
    )
    told += f"rings through all {size} use {links} of a GPU's {min(totals)} = {format_bytes_per_s(links * rate)}"
    warnings = [] if chip is not None else [_unnamed(max(totals), chips, rate)]
    if len(set(totals)) > 1:
        warnings.append(f"GPUs have unlike numbers of NVLinks ({min(totals)} to {max(totals)}): a link may be down")
    if shares > 1:
        told += f"; a group of n neighbours is priced with (n - 1)/{shares} of it"
    missing = sum(1 for count in counts.values() if count == 0) // 2
    if missing:
        warnings.append(
            f"a hybrid mesh: {missing} of {size * (size - 1) // 2} pairs have no NVLink; messages between these are "
            f"slower than the {format_bytes_per_s(links * rate / shares)} that pairs are priced with"
        )
    usual = _usual(chips) if chip is not None and shares == 1 else _DIRECT
    if usual != _DIRECT and abs(catalogue_link(usual).bytes_per_s / (links * rate) - 1) < 1e-6:
        return NodeLink(value=usual, read=(told,), warnings=tuple(warnings))
    value: dict[str, object] = {"link": _DIRECT, "bandwidth": _bandwidth(links * rate)}
    value |= {"nvls": False, "direct_peers": shares, "source": told}
    return NodeLink(value=value, read=(told,), warnings=tuple(warnings))


def _pcie(
    pairs: Pairs, counts: Mapping[tuple[int, int], int], totals: Sequence[int], size: int, chip: Chip | None
) -> NodeLink:
    """Some pair has no NVLink: whatever spans the node goes over PCIe."""
    paths = [link for link in pairs.values() if not link.startswith("NV")]
    worst = max(paths, key=_slowness)
    base, warnings = _pcie_generation(chip)
    link = catalogue_link(base)
    value: str | dict[str, object] = base
    told = f"GPUs are joined over PCIe ({', '.join(sorted(set(paths), key=_slowness))}): {base}"
    if worst in ("SYS", "SOC"):
        told += f", and between sockets {format_bytes_per_s(SOCKET_BYTES_PER_S)} (NCCL's figure for Skylake)"
        source = f"{worst} between GPUs: NCCL 2.18 src/graph/topo.h, SKL_QPI_BW"
        value = {"link": base, "bandwidth": _bandwidth(min(SOCKET_BYTES_PER_S, link.bytes_per_s)), "source": source}
        warnings.append("the rate between sockets is a usual figure: an nccl-tests log of this node would give its own")
    if max(totals, default=0) > 0:
        warnings.append(_bridges(counts, totals, size))
    elif chip is not None and chip.switched:
        warnings.append(
            f"{chip.name} has {chip.nvlinks} NVLinks and the matrix shows none: its fabric is hidden (a virtual "
            "machine) or down (nvidia-fabricmanager); once it shows, leave node_link out"
        )
    return NodeLink(value=value, read=(told,), warnings=tuple(warnings))


def _pcie_generation(chip: Chip | None) -> tuple[str, list[str]]:
    if chip is not None and chip.device is not None:
        return _PCIE_OF.get(catalogue_device(chip.device).device.generation, "pcie3"), []
    return "pcie3", [
        "the device is not known: the slowest generation of PCIe (pcie3) is taken; write cluster.device and pcie4 or "
        "pcie5"
    ]


def _bridges(counts: Mapping[tuple[int, int], int], totals: Sequence[int], size: int) -> str:
    """What NVLinks that join only some GPUs are good for."""
    groups = [group for group in islands(counts, size) if len(group) > 1]
    shown = ", ".join("-".join(str(gpu) for gpu in group) for group in groups[:4]) + (" ..." if len(groups) > 4 else "")
    alone = totals.count(0)
    rest = f", {counted(alone, 'GPU')} none at all" if alone else ""
    text = f"NVLinks join only {counted(len(groups), 'group')} of GPUs ({shown}){rest}: priced over PCIe throughout"
    widths = {len(group) for group in groups}
    if len(widths) == 1 and not alone and all(group == list(range(group[0], group[-1] + 1)) for group in groups):
        width = widths.pop()
        text += (
            f"; for one node alone, write its {len(groups)} groups as nodes: {len(groups)}, devices_per_node: {width}, "
            "their NVLinks as node_link and PCIe as network"
        )
    return text


def _of_another_maker(pairs: Pairs, size: int) -> NodeLink:
    """MetaXLink and Ethernet inside a node: the catalogue has no rate of these."""
    kinds = {link: sum(1 for found in pairs.values() if found == link) for link in sorted(set(pairs.values()))}
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    joined = {pair: int(link == "MX") for pair, link in pairs.items()}
    joined |= {(j, i): count for (i, j), count in joined.items()}
    groups = islands(joined, size)
    shown = " and ".join("-".join((str(group[0]), str(group[-1]))) for group in groups[:4])
    read = (f"links of a MetaX machine between pairs: {told}; groups joined by MetaXLink: {shown}",)
    warning = "mmplan knows no MetaX device: write cluster.device and node_link with numbers of your own"
    return NodeLink(value=None, read=read, warnings=(warning,))


def _bandwidth(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.6g} GB/s"
