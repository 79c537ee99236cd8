"""`nvidia-smi topo -m` matrices in a text: which link joins which GPU and NIC, as far as the text has whole rows.

Rows may have lost their indent, tabs or alignment, may be wrapped by a terminal, tagged with a rank or host, and stand
in a log. A cell that is missing shifts the others, so every row must have its X on the diagonal. Nothing is made up:
rows that are cut off are left out and named.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.document import counted, listed, shown

MOST_DEVICES = 1024

Row = tuple[str, ...]

LINK = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|SOC|NV\d{1,3}|MX|ETH|NA", re.ASCII)
_P2P = ("OK", "CNS", "GNS", "TNS", "NS", "U", "DR")
_GPU = re.compile(r"GPU\d{1,4}", re.ASCII)
_GPU_COLUMN = re.compile(r"(?<!\S)GPU\d{1,4}(?=\s|$)", re.ASCII)
_HEADER_START = re.compile(
    r"(?<!\S)GPU\d{1,4}\s+(?:GPU\d{1,4}(?!\S)|CPU\s+Affinity|Node\s+Affinity|NIC\d|mlx\d)", re.ASCII
)
_RUN_TOGETHER = re.compile(r"GPU0(?:GPU1|CPU Affinity|NIC0)")
_AFFINITY = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|Node\s+Affinity|GPU\s+NUMA\s+ID")
_NAME = re.compile(r"(?:GPU|NIC)\d{1,4}|[a-z][\w.:-]{0,30}[\d_][\w.:-]{0,30}", re.ASCII)  # mlx5_0, rocep4s0f1
_MOST_WRAPPED = 8
P2P_ROW = re.compile(r"\s*GPU\d{1,4}\s+(?:(?:X|OK|CNS|GNS|TNS|NS|U|DR)\s+)*(?:OK|CNS|GNS|TNS|NS|U|DR)\b", re.ASCII)
_NUMBERS = re.compile(r"\d[\d,-]*|N/A", re.ASCII)
_TAG = re.compile(r"\s*(\[[\w.,-]+\]<std\w+>:?|\[?[\w.-]+\]?:(?=\s)|[\w.-]+\s+\|(?=\s))")
_OF_A_MATRIX = re.compile(  # how a line of a matrix of nvidia-smi, rocm-smi or amd-smi begins
    r"\s*(?:GPU\s?\[?\d|NIC\d|mlx\d|[a-z]\w*\d\s+(?:X|SYS|NODE|P\w\w)\s|(?:X|SYS|NODE|PHB|PXB|PIX|SOC|NV\d+)\s"
    r"|=+ |[A-Z][A-Z ]+ TABLE:|[0-9a-fA-F]{4}:)"
)
_END = re.compile(r"^\s*(?:NIC )?Legend:|^=+ ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """One host's matrix.

    Attributes:
        file, line: of its header.
        gpus, nics: labels of the columns.
        cells: per label of a whole row, the link to each column.
        row_lines: per such label, its line.
        cpu, numa: per GPU, what the affinity columns say; absent where they say nothing.
        cut: what is missing, a sentence, or nothing.
        host: the tag of its lines, or the word before the command in the line above; empty where there is none.
    """

    file: Path
    line: int
    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    cells: Mapping[str, Mapping[str, str]]
    row_lines: Mapping[str, int]
    cpu: Mapping[str, str]
    numa: Mapping[str, str]
    cut: str
    host: str

    def link(self, first: str, second: str) -> str | None:
        """The link of a pair by either row; None where neither is there."""
        found = self.cells.get(first, {}).get(second)
        return found if found is not None else self.cells.get(second, {}).get(first)


def find_matrices(lines: Sequence[str], file: Path) -> list[Matrix]:
    """All matrices of a text, in its order.

    Raises:
        InputError: a row with cells missing or too many, a label twice, columns run together, or another matrix.
    """
    streams: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines, start=1):
        tag, rest = untagged(line)
        streams.setdefault(tag, []).append((number, rest))
    streams = {tag: _without_p2p(stream) for tag, stream in streams.items()}
    found = [matrix for tag, stream in streams.items() for matrix in _stream_matrices(tag, stream, file)]
    return sorted(found, key=lambda matrix: matrix.line)


def _without_p2p(stream: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Lines without the matrices of `topo -p2p`, where another one stands beside them."""
    blocks: list[list[tuple[int, str]]] = [[]]
    for item in stream:
        if _is_header(item[1]):
            blocks.append([])
        blocks[-1].append(item)
    kept = [block for block in blocks[1:] if not any(P2P_ROW.match(text) for _, text in block)]
    return [item for block in (blocks[0], *kept) for item in block] if kept else stream


def untagged(line: str) -> tuple[str, str]:
    """The rank or host before a line of a matrix, and the rest; other lines have none."""
    text = line.replace("|", " ") if line.lstrip().startswith("|") else line
    match = _TAG.match(text)
    if match is None or _OF_A_MATRIX.match(match[1]) or not _OF_A_MATRIX.match(text, match.end()):
        return "", text
    return match[1].strip("[]:| "), text[match.end() :]


def _stream_matrices(tag: str, stream: Sequence[tuple[int, str]], file: Path) -> list[Matrix]:
    found, place = [], 0
    while place < len(stream):
        number, text = stream[place]
        if "GPU" not in text:
            place += 1
            continue
        if _RUN_TOGETHER.search(text):
            raise InputError(
                "the columns have run together: paste the matrix with its blanks or tabs", file=file, line=number
            )
        if _is_header(text):
            above = stream[place - 1][1] if place else ""
            matrix, place = _read_matrix(tag or _host(above), stream, place, file)
            found.append(matrix)
        else:
            place += 1
    return found


def _is_header(text: str) -> bool:
    """Column names, at least one of a GPU, and no link among them."""
    match = _HEADER_START.search(text)
    return match is not None and not any(LINK.fullmatch(word) for word in text[match.start() :].split())


def _host(above: str) -> str:
    """`nodeB` of `2025/05/21 09:40:05 nodeB nvidia-smi topo -m` or of `user@nodeB:~$ nvidia-smi topo -m`."""
    match = re.search(r"@([\w.-]+)[^@]*nvidia-smi\s+topo|\s([A-Za-z][\w.-]*)\s+nvidia-smi\s+topo", above[:500])
    return (match[1] or match[2]) if match else ""


def _columns(text: str) -> tuple[list[str], list[str]]:
    """Names of the devices of a header, and of its affinity columns."""
    affinity = [re.sub(r"\s+", " ", word) for word in _AFFINITY.findall(text)]
    return _AFFINITY.sub(" ", text).split(), affinity


def _read_matrix(host: str, stream: Sequence[tuple[int, str]], place: int, file: Path) -> tuple[Matrix, int]:
    line, text = stream[place]
    start = _GPU_COLUMN.search(text)
    assert start is not None
    text, place = _whole_header(text[start.start() :], stream, place + 1)
    names, affinity = _columns(text)
    _check_names(names, file, line)
    known = frozenset(names)
    rows: dict[str, Row] = {}
    row_lines: dict[str, int] = {}
    rest: dict[str, Row] = {}
    cut = ""
    while place < len(stream) and len(rows) < len(names):
        number, text = stream[place]
        if _is_header(text) or _END.match(text):
            break
        label, tokens = _labelled(text, known)
        if label is None:
            _refuse_other_labels(text, file, number)
            place += 1
            continue
        place += 1
        while len(tokens) < len(names) and place < len(stream) and _continues_row(stream[place][1]):
            tokens = _joined(tokens, text, stream[place][1], len(names))
            place += 1
        links, after = _leading_links(tokens), tokens[len(names) :]
        if len(links) < len(names):
            cut = _cut_row(label, links, tokens, names, stream[place:], file, number)
            break
        _check_row(label, links, names, rows, file, number)
        if affinity and not after and label.startswith("GPU") and not any(line.strip() for _, line in stream[place:]):
            cut = f"the row of {label} in line {number} is cut off after its links"  # the last one may not be whole
            break
        if after and not _NUMBERS.fullmatch(after[0]):
            message = f"expected CPUs or nothing after the links of {label}, found {shown(after[0])}"
            raise InputError(message, file=file, line=number)
        rows[label], row_lines[label] = tuple(links[: len(names)]), number
        rest[label] = tuple(after)
    missing = [name for name in names if name not in rows]
    if missing:
        what = f"{len(missing)} of {len(names)} rows are missing ({_shortened(missing)})"
        cut = f"{cut}; {what}" if cut else what
    gpus = tuple(name for name in names if _GPU.fullmatch(name))
    cpu, numa = _affinities(rest, gpus, affinity)
    matrix = Matrix(
        file=file,
        line=line,
        gpus=gpus,
        nics=tuple(name for name in names if name not in gpus),
        cells={label: dict(zip(names, row, strict=True)) for label, row in rows.items()},
        row_lines=row_lines,
        cpu=cpu,
        numa=numa,
        cut=cut,
        host=host,
    )
    return matrix, place


def _cut_row(
    label: str,
    links: Sequence[str],
    tokens: Sequence[str],
    names: Sequence[str],
    below: Sequence[tuple[int, str]],
    file: Path,
    line: int,
) -> str:
    """That the table ends in this row; InputError where cells are missing in its middle, or it is no topology."""
    _refuse_p2p(tokens, file, line)
    if _rows_follow(below, frozenset(names)):
        found = f"{len(links)} of its {len(names)} cells"
        raise InputError(f"the row of {label} has {found}: something is missing in it", file=file, line=line)
    return f"the row of {label} in line {line} is cut off after {counted(len(links), 'cell')}"


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]}"


def _check_names(names: Sequence[str], file: Path, line: int) -> None:
    if len(names) > MOST_DEVICES:
        raise InputError(f"{len(names)} columns; a node has at most {MOST_DEVICES} devices", file=file, line=line)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"the column {listed(twice, 3)} stands twice", file=file, line=line)
    for kind in ("GPU", "NIC"):
        found = [name for name in names if re.fullmatch(rf"{kind}\d+", name)]
        first = int(found[0][3:]) if found and kind == "GPU" else 0  # `topo -m -i 4,5,6,7` begins elsewhere
        expected = [f"{kind}{first + index}" for index in range(len(found))]
        if found != expected:
            lost = [name for name in expected if name not in found]
            what = f"{lost[0]} is missing" if lost else "they are not in order"
            raise InputError(
                f"the columns {_shortened(found)} do not count from {kind}{first}: {what}", file=file, line=line
            )
    odd = [name for name in names if not _NAME.fullmatch(name)]
    if odd:
        raise InputError(f"expected the name of a GPU or a NIC, found {shown(odd[0])}", file=file, line=line)


def _whole_header(text: str, stream: Sequence[tuple[int, str]], place: int) -> tuple[str, int]:
    """A header with the lines into which a terminal wrapped it, between words or inside of one."""
    if _AFFINITY.search(text) and _is_names(text):
        return text, place
    ahead = [line for _, line in stream[place : place + _MOST_WRAPPED]]
    for count in range(1, len(ahead) + 1):
        if any(LINK.fullmatch(word) for word in ahead[count - 1].split()):
            break  # a row
        for between in (" ", ""):
            joined = between.join([text, *ahead[:count]])
            if _AFFINITY.search(joined) and _is_names(joined):
                return joined, place + count
    if not _is_names(text):
        return text, place
    more = next((count for count, line in enumerate(ahead) if not line.split() or not _is_names(line)), len(ahead))
    return " ".join([text, *ahead[:more]]), place + more


def _is_names(text: str) -> bool:
    return all(_NAME.fullmatch(word) for word in _AFFINITY.sub(" ", text).split())


def _labelled(text: str, names: frozenset[str]) -> tuple[str | None, list[str]]:
    """The label of a row and the words after it, with empty cells dropped."""
    words = text.split()
    for index, word in enumerate(words[:6]):
        if word in names and index + 1 < len(words) and (LINK.fullmatch(words[index + 1]) or words[index + 1] in _P2P):
            return word, words[index + 1 :]
    if words and words[-1] in names and len(words) <= 2:  # cut off after the label
        return words[-1], []
    return None, []


def _refuse_other_labels(text: str, file: Path, line: int) -> None:
    words = text.split()
    if len(words) > 2 and re.fullmatch(r"(?:GPU|NIC)\d+|mlx\d+_\w+", words[0]) and LINK.fullmatch(words[1]):
        raise InputError(f"a row of {words[0]}, which has no column: the header is not whole", file=file, line=line)


def _continues_row(text: str) -> bool:
    words = text.split()
    links = [bool(LINK.fullmatch(word)) for word in words]
    return bool(words) and all(link or _NUMBERS.fullmatch(word) for link, word in zip(links, words, strict=True))


def _joined(tokens: Sequence[str], text: str, more: str, columns: int) -> list[str]:
    """A row with its wrapped rest: a terminal breaks lines inside of words as well as between them."""
    glued = [*tokens[:-1], *(f"{tokens[-1]}{more.lstrip()}".split() if tokens else more.split())]
    apart = [*tokens, *more.split()]
    if not text.endswith((" ", "\t")) and len(_leading_links(glued)) >= columns > len(_leading_links(apart)):
        return glued
    return apart


def _leading_links(tokens: Sequence[str]) -> list[str]:
    count = next((index for index, word in enumerate(tokens) if not LINK.fullmatch(word)), len(tokens))
    return list(tokens[:count])


def _refuse_p2p(tokens: Sequence[str], file: Path, line: int) -> None:
    if any(word in _P2P for word in tokens):
        message = (
            "this is the matrix of 'nvidia-smi topo -p2p', which says whether GPUs reach each other, not by which link"
        )
        raise InputError(f"{message}: run 'nvidia-smi topo -m'", file=file, line=line)


def _rows_follow(stream: Sequence[tuple[int, str]], names: frozenset[str]) -> bool:
    for _, text in stream:
        if _is_header(text):
            return False
        if _END.match(text) or len(_leading_links(_labelled(text, names)[1])) > 0:
            return True
    return False


def _check_row(
    label: str, links: Sequence[str], names: Sequence[str], rows: Mapping[str, Row], file: Path, line: int
) -> None:
    if label in rows:
        raise InputError(f"the row of {label} stands twice", file=file, line=line)
    if len(links) > len(names):
        found = f"{len(links)} cells for {len(names)} columns"
        raise InputError(f"the row of {label} has {found}: the header or the row is not whole", file=file, line=line)
    crosses = [name for name, link in zip(names, links, strict=True) if link == "X"]
    if crosses != [label]:
        where = f"in column {listed(crosses, 4)}" if crosses else "in no column"
        raise InputError(f"the row of {label} has its X {where}: a cell is missing or moved", file=file, line=line)


def _affinities(
    rest: Mapping[str, Row], gpus: Sequence[str], affinity: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """CPU and NUMA affinity per GPU, where a row has as many numbers as there are such columns or the first of them."""
    cpu: dict[str, str] = {}
    numa: dict[str, str] = {}
    order = [column for column in affinity if column != "GPU NUMA ID"]
    for gpu in gpus:
        values = rest.get(gpu, ())
        if not all(_NUMBERS.fullmatch(value) for value in values):
            continue
        for column, value in zip(order, values, strict=False):
            if value != "N/A":
                (cpu if column == "CPU Affinity" else numa)[gpu] = value
    return cpu, numa
