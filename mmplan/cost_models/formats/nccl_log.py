"""The runs of an nccl-tests or rccl-tests log: rows with the ranks, hosts and collective that they belong to.

A run begins with its parameters (`# nThread 1 ...`), its name (`Collective test starting`) or its column titles.
Lines that processes tag with their rank or pod are told apart by their tags: tables printed at a time stay whole.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmplan.cost_models.formats.nccl_rows import Damaged, Row, read_row
from mmplan.errors import InputError

MOST_ROWS = 100_000

# Programs of nccl-tests and rccl-tests.
COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "alltoallv", "alltoall", "broadcast", "reduce", "sendrecv", "gather",
    "scatter", "hypercube", "all_reduce_bias",
)  # fmt: skip

_PARAMETERS = re.compile(r"\bnThread +(\d{1,4}) +nGpus +(\d{1,4})\b")
_TITLES = re.compile(r"\bsize +count +type\b|\bbytes +N +type\b")
_STARTING = re.compile(r"Collective test starting: *(\w+)_perf")
_PROGRAM = re.compile(rf"\b({'|'.join(sorted(COLLECTIVES, key=len, reverse=True))})_perf")
_DEVICE = re.compile(
    r"Rank +(\d{1,6}) +(?:Group +(\d{1,6}) +)?(?:Pid +(\d{1,10}) +)?on +(\S{1,200}) +device +(\d{1,4}) +\[[^\]]*\]"
    r" *(.{0,80})"
)
_FAILURE = re.compile(
    r"Test (?:NCCL|RCCL|CUDA|HIP) failure|Test failure|NCCL WARN|no CUDA-capable device|^srun: error"
    r"|unhandled (?:cuda|system|hip) error|Segmentation fault|CANCELLED|\bSIGTERM\b|\bOOM\b"
)
_PLACED = re.compile(
    r"n[Rr]anks \d{1,6} nNodes (?P<nodes>\d{1,6})|--ntasks-per-node[= ](?P<tasks>\d{1,4})"
    r"|\bppr:(?P<ppr>\d{1,4}):node"
)
# A line without any of these says nothing: most lines of a long log.
_ANYTHING = re.compile(
    r"nThread|count |bytes |Collective|_perf|Rank |bus bandwidth|Out of bounds|failure|WARN|error|CUDA-capable|nNodes"
    r"|ntasks|ppr:|fault|CANCELLED|SIGTERM|OOM|float|half|double|int\d|int |char|bf16|fp16|f8e|fp8"
)
_OUT_OF_BOUNDS = re.compile(r"Out of bounds values : *(\d+) *(\w+)?")
_AVERAGE = re.compile(r"Avg bus bandwidth *: *(\d+(?:\.\d+)?)")
_TAG = re.compile(r"^\s*(?:\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\s+)?"
                  r"(\[\d+,\d+\]<std\w+>:?|\[[\w./-]+\](?=\s)|[\w.-]+:(?=\s)|[\w.-]+\s+\|(?=\s))")  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankLine:
    """`Rank 0 Group 0 Pid 1 on node device 0 [bus] NAME`."""

    rank: int
    group: int
    pid: int
    host: str
    device: int
    name: str
    line: int


@dataclass(slots=True)
class Run:
    """One table while it is read. `named`: programs named before it, and in its own lines."""

    file: Path
    line: int
    titles: str = ""
    titles_line: int = 0
    gpus_per_process: int | None = None
    nodes: int | None = None  # by NCCL's own lines
    tasks_per_node: int | None = None  # by the command
    named: list[str] = field(default_factory=list)
    ranks: list[RankLine] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    damaged: list[Damaged] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    wrong_values: int = 0
    average: float | None = None


def program_in(text: str) -> str | None:
    """The collective whose program a text names."""
    program = _PROGRAM.search(text)
    return None if program is None else program[1]


def read_runs(lines: Sequence[str], file: Path) -> list[Run]:
    """The runs of a text, those of each tag in turn, with tables or without.

    Raises:
        InputError: a table of more than 100,000 rows.
    """
    streams: dict[str, list[Run]] = {}
    for number, text in enumerate(lines, start=1):
        line = text[:4000]
        if _ANYTHING.search(line) is None:
            continue
        match = _TAG.match(line)
        stream = streams.setdefault(match[1].strip("[]:| ") if match is not None and _matters(line) else "", [])
        if len(streams) > 4096:
            break  # not ranks any more
        _take(line, number, stream, file)
    runs = [run for stream in streams.values() for run in stream]
    _share(runs)
    return sorted(runs, key=lambda run: run.line)


def _matters(line: str) -> bool:
    """Lines that belong to a table keep their tag; the rest of a log goes to one stream."""
    return any(pattern.search(line) for pattern in (_PARAMETERS, _TITLES, _DEVICE, _AVERAGE, _OUT_OF_BOUNDS)) or (
        read_row(line, 0) is not None
    )


def _take(line: str, number: int, stream: list[Run], file: Path) -> None:
    """One line into the last run of its stream, or into a new one."""
    parameters, titles = _PARAMETERS.search(line), _TITLES.search(line)
    starting = _STARTING.search(line)
    if not stream or ((parameters or titles or starting) and _ended(stream[-1], bool(titles))):
        stream.append(Run(file=file, line=number))
    run = stream[-1]
    if parameters is not None:
        run.gpus_per_process = int(parameters[1]) * int(parameters[2])
    if titles is not None:
        run.titles, run.titles_line = line, number
    _placed(line, run)
    program = _PROGRAM.search(line)
    if program is not None and program[1] not in run.named:
        if run.rows:  # the command of the next run
            stream.append(Run(file=file, line=number))
            run = stream[-1]
        run.named.append(program[1])
    device = _DEVICE.search(line)
    if device is not None:
        rank, group, pid, host, index, name = device.groups()
        name = re.split(r"\s+#|\s{2,}", name.strip())[0]
        run.ranks.append(RankLine(int(rank), int(group or 0), int(pid or 0), host, int(index), name, number))
        return
    row = read_row(line, number)
    if isinstance(row, Row):
        run.rows.append(row)
        if len(run.rows) > MOST_ROWS:
            raise InputError(f"a table of more than {MOST_ROWS:,} rows", file=file, line=number)
    elif row is not None:
        run.damaged.append(row)
    elif _FAILURE.search(line):
        run.failures.append((number, " ".join(line.split())[:120]))
    _totals(line, run)


def _placed(line: str, run: Run) -> None:
    match = _PLACED.search(line)
    if match is None:
        return
    if match["nodes"] is not None:
        run.nodes = int(match["nodes"])
    else:
        run.tasks_per_node = int(match["tasks"] or match["ppr"])


def _ended(run: Run, titles: bool) -> bool:
    """A run that has rows, or titles when others come, is over."""
    return bool(run.rows or run.damaged) or (titles and bool(run.titles))


def _totals(line: str, run: Run) -> None:
    bounds, average = _OUT_OF_BOUNDS.search(line), _AVERAGE.search(line)
    if bounds is not None:
        run.wrong_values = int(bounds[1][:18])
    if average is not None:
        run.average = float(average[1][:30])


def _share(runs: Sequence[Run]) -> None:
    """Titles, device lists, programs and failures that stand under another tag than the only table go to the table."""
    tables = [run for run in runs if run.rows or run.damaged]
    if len(tables) != 1:
        return
    table = tables[0]
    for run in runs:
        if run is table:
            continue
        table.ranks += run.ranks
        table.named += [name for name in run.named if name not in table.named]
        table.failures += run.failures
        table.titles, table.titles_line = table.titles or run.titles, table.titles_line or run.titles_line
        table.gpus_per_process = table.gpus_per_process or run.gpus_per_process
        table.nodes = table.nodes or run.nodes
        table.tasks_per_node = table.tasks_per_node or run.tasks_per_node
        run.ranks, run.failures, run.titles = [], [], ""
