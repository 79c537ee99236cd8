"""The matrices of `rocm-smi --showtopo` and `amd-smi topology`: type, hops and weight of the link of each pair of GPUs.

A matrix is what its cells say: types where they are XGMI or PCIE, whatever the title above. Every row must have as many
cells as there are columns and its own place on the diagonal; rows that are cut off at the end are left out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.document import shown

MOST_DEVICES = 1024

_LABEL = re.compile(r"GPU\d{1,4}|[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d", re.ASCII)
_TITLES = (
    ("weight", re.compile(r"Weight between two GPUs|^WEIGHT TABLE:")),
    ("hops", re.compile(r"Hops between two GPUs|^HOPS TABLE:")),
    ("type", re.compile(r"Link Type between two GPUs|^LINK TYPE TABLE:")),
    ("other", re.compile(r"between two GPUs|^[A-Z][A-Z -]* TABLE:|Numa Nodes|^=+ .* =+$")),
)
_NUMA = re.compile(r"GPU\[(\d{1,4})\]\s*:\s*\(Topology\) Numa (Node|Affinity):\s*(-?\d{1,4})\s*$", re.ASCII)
_NUMA_START = re.compile(r"GPU\[\d{1,4}\]\s*:")
_SELF = ("0", "SELF", "X", "-", "N/A")
_TYPES = ("XGMI", "PCIE", "PCIe", "UNKNOWN", "XXXX", "N/A", "NO_IOLINK")
_NUMBER = re.compile(r"\d{1,6}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class RocmTopology:
    """One host.

    Attributes:
        gpus: labels, in their order.
        types, hops, weights: per pair of positions (lower first) whose row is there; types are XGMI, PCIE or `?`.
        numa, affinity: NUMA node of a GPU, and the one that it is bound to, by position.
        cut: sentences on what is missing.
    """

    file: Path
    line: int
    gpus: tuple[str, ...]
    types: Mapping[tuple[int, int], str]
    hops: Mapping[tuple[int, int], int]
    weights: Mapping[tuple[int, int], int]
    numa: Mapping[int, int]
    affinity: Mapping[int, int]
    cut: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Numa:
    nodes: Mapping[int, int]
    affinity: Mapping[int, int]
    cut: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Section:
    kind: str
    line: int
    labels: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]
    cut: str


def read_rocm(lines: Sequence[str], file: Path) -> list[RocmTopology]:
    """The hosts whose matrices and NUMA lists stand in a text: a matrix of a kind that was there begins another host.

    Raises:
        InputError: neither is there, a damaged row, matrices of unlike GPUs, or two rows that disagree.
    """
    hosts: list[list[_Section]] = [[]]
    for section in _sections(lines, file):
        if any(section.kind == other.kind for other in hosts[-1]):
            hosts.append([])
        hosts[-1].append(section)
    starts = [sections[0].line if sections else 1 for sections in hosts]
    ends = [*(start - 1 for start in starts[1:]), len(lines)]
    starts[0] = 1
    return [
        _host(sections, _numa(lines, start, end, file), file)
        for sections, start, end in zip(hosts, starts, ends, strict=True)
    ]


def _host(sections: Sequence[_Section], found: _Numa, file: Path) -> RocmTopology:
    labels = sections[0].labels if sections else tuple(f"GPU{index}" for index in range(len(found.nodes)))
    if not labels:
        raise InputError("found no matrix between two GPUs and no list of NUMA nodes", file=file)
    for section in sections:
        if section.labels != labels:
            told = f"{len(section.labels)} GPUs here, {len(labels)} in line {sections[0].line}"
            raise InputError(f"matrices of unlike GPUs: {told}", file=file, line=section.line)
    missing = [index for index in range(len(labels)) if index not in found.nodes]
    if found.nodes and not found.cut and (missing or len(found.nodes) > len(labels)):
        what = f"GPU[{missing[0]}] is missing" if missing else f"{len(found.nodes)} GPUs, the matrix has {len(labels)}"
        raise InputError(f"the list of NUMA nodes is not whole: {what}", file=file, line=found.line)
    pairs: dict[str, dict[tuple[int, int], str]] = {"type": {}, "hops": {}, "weight": {}}
    for section in sections:
        pairs[section.kind] = _pairs(section, file)
    return RocmTopology(
        file=file,
        line=sections[0].line if sections else found.line,
        gpus=labels,
        types={pair: _type(cell) for pair, cell in pairs["type"].items()},
        hops={pair: int(cell) for pair, cell in pairs["hops"].items() if _NUMBER.fullmatch(cell)},
        weights={pair: int(cell) for pair, cell in pairs["weight"].items() if _NUMBER.fullmatch(cell)},
        numa=found.nodes,
        affinity=found.affinity,
        cut=tuple(text for text in (*(section.cut for section in sections), found.cut) if text),
    )


def _type(cell: str) -> str:
    return cell.upper() if cell.upper() in ("XGMI", "PCIE") else "?"


def _sections(lines: Sequence[str], file: Path) -> list[_Section]:
    found: list[_Section] = []
    kind, place = "", 0
    while place < len(lines):
        text = lines[place].strip()
        title = next((name for name, pattern in _TITLES if pattern.search(text)), None)
        kind = kind if title is None else title
        words = text.split()
        if len(words) > 1 and all(_LABEL.fullmatch(word) for word in words):
            section, place = _section(kind or "type", words, lines, place, file)
            if section.kind != "other":
                found.append(section)
            continue
        if re.match(r"GPU0GPU1", text):
            raise InputError("the columns have run together: paste the matrix as printed", file=file, line=place + 1)
        place += 1
    return found


def _section(kind: str, labels: Sequence[str], lines: Sequence[str], place: int, file: Path) -> tuple[_Section, int]:
    header = place + 1
    if len(labels) > MOST_DEVICES or len(set(labels)) < len(labels):
        raise InputError(f"expected at most {MOST_DEVICES} different GPUs in the header", file=file, line=header)
    if labels[0].startswith("GPU") and list(labels) != [f"GPU{index}" for index in range(len(labels))]:
        raise InputError("the columns do not count from GPU0: one is missing or moved", file=file, line=header)
    rows: dict[str, tuple[str, ...]] = {}
    place += 1
    cut = ""
    while place < len(lines) and len(rows) < len(labels):
        words = lines[place].split()
        if not words:
            place += 1
            continue
        if words[0] != labels[len(rows)]:
            break
        if len(words) - 1 != len(labels):
            last = not any(line.strip() for line in lines[place + 1 :][:1000])
            if last and len(words) - 1 < len(labels):
                cut = f"the row of {words[0]} in line {place + 1} is cut off"
                place += 1
                break
            cells = f"{len(words) - 1} cells for {len(labels)} columns"
            raise InputError(f"the row of {words[0]} has {cells}", file=file, line=place + 1)
        rows[words[0]] = tuple(words[1:])
        place += 1
    if any(cell.upper() in ("XGMI", "PCIE") for row in rows.values() for cell in row):
        kind = "type"
    for label, row in rows.items():
        _check_row(kind, label, row, labels, file, header)
    if len(rows) < len(labels) and not cut:
        if place < len(lines) and _LABEL.match(lines[place]):
            found = f"found a row of {shown(lines[place].split()[0])}"
            raise InputError(f"expected the row of {labels[len(rows)]}, {found}", file=file, line=place + 1)
        cut = f"the matrix in line {header} ends after {len(rows)} of {len(labels)} rows"
    return _Section(kind=kind, line=header, labels=tuple(labels), rows=rows, cut=cut), place


def _check_row(kind: str, label: str, row: Sequence[str], labels: Sequence[str], file: Path, header: int) -> None:
    if kind == "other":
        return
    own = labels.index(label)
    line = header + own + 1
    if row[own] not in _SELF:
        message = f"the row of {label} has {shown(row[own])} on the diagonal: a cell is missing or moved"
        raise InputError(message, file=file, line=line)
    for place, cell in enumerate(row):
        fits = cell in _TYPES if kind == "type" else _NUMBER.fullmatch(cell) or cell in ("XXXX", "N/A")
        if place != own and (not fits or (kind == "type" and cell == "0")):
            expected = "XGMI or PCIE" if kind == "type" else "a number"
            raise InputError(f"expected {expected} in the row of {label}, found {shown(cell)}", file=file, line=line)


def _pairs(section: _Section, file: Path) -> dict[tuple[int, int], str]:
    """The cell of each pair; both rows must say the same."""
    pairs: dict[tuple[int, int], str] = {}
    for row, (label, cells) in enumerate(section.rows.items()):
        for column, cell in enumerate(cells):
            pair = min(row, column), max(row, column)
            if row == column:
                continue
            if pairs.setdefault(pair, cell) != cell:
                other = section.labels[column]
                message = f"{label} and {other} are joined by {pairs[pair]} and by {cell}: the matrix is not symmetric"
                raise InputError(message, file=file, line=section.line + row + 1)
    return pairs


def _numa(lines: Sequence[str], start: int, end: int, file: Path) -> _Numa:
    """The list between two lines, both of them included."""
    nodes: dict[int, int] = {}
    affinity: dict[int, int] = {}
    cut, first = "", 1
    for number in range(start, end + 1):
        line = lines[number - 1]
        match = _NUMA.search(line)
        if match is not None:
            first = number if not nodes and not affinity else first
            kept = nodes if match[2] == "Node" else affinity
            if int(match[1]) in kept:
                raise InputError(f"GPU[{match[1]}] stands twice in the list of NUMA nodes", file=file, line=number)
            kept[int(match[1])] = int(match[3])
        elif _NUMA_START.match(line) and "(Topology" in line:
            cut = f"the list of NUMA nodes is cut off in line {number}"
    if affinity and affinity.keys() != nodes.keys() and not cut:
        cut = f"the list of NUMA nodes has {len(nodes)} nodes and {len(affinity)} affinities"
    return _Numa(nodes=nodes, affinity=affinity, cut=cut, line=first)
