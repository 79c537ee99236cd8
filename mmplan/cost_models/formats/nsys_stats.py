"""Sums that `nsys stats` and nvprof print: kernels, copies, calls and ranges by name, without when they ran.

Durations are added here: what overlapped on several streams counts as often as it ran. `cuda_gpu_trace` has times and
is a recording.
"""

from dataclasses import dataclass, field
from pathlib import Path

from mmplan.cost_models.formats.kineto_arguments import integer
from mmplan.cost_models.formats.kineto_head import rank_in_name
from mmplan.cost_models.formats.nsys_tables import Section, number_of, sections
from mmplan.cost_models.traces.gathering import BY_NAME, Gathered
from mmplan.cost_models.traces.kernel_classes import (
    CLASS_INDEX,
    COMMUNICATION,
    MEMCPY,
    MEMSET,
    collective,
    kernel_class,
    short_name,
)
from mmplan.cost_models.traces.modules_of import part_of
from mmplan.cost_models.traces.record import ClassTime, CopyTime, MessageTime, OperatorTime, PartTime, RankTrace
from mmplan.cost_models.traces.recording import Recording, Stream
from mmplan.cost_models.traces.summary import MOST_ROWS
from mmplan.errors import InputError
from mmplan.scenario.document import counted
from mmplan.scenario.formats.reading import read_head
from mmplan.units import bytes_of_unit, nanoseconds_of_seconds, seconds_of_unit

_SHARES_LOST = 2.0  # percent that the shares of a whole table may lack
_ROUNDING = 1.01
REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")
_MOST_NS = 4 * 10**18

Sums = dict[str, tuple[float, int]]
TABLES = ("kernels", "copies", "calls", "ranges", "projected")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """A file of sums, or a recording where its table has times."""

    trace: RankTrace | None
    recording: Recording | None
    warnings: tuple[str, ...]
    ignored: tuple[str, ...]


@dataclass(slots=True)
class _Sums:
    """(seconds, count) by table and name; `bytes` of copies; `device` work with times."""

    tables: dict[str, Sums] = field(default_factory=lambda: {table: {} for table in TABLES})
    bytes: dict[str, float] = field(default_factory=dict)
    least_and_median: dict[str, tuple[float, float]] = field(default_factory=dict)
    device: Gathered = field(default_factory=Gathered)
    warnings: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def read_stats(path: Path) -> Stats:
    """What the tables of a file say.

    Raises:
        InputError: no table that is known, or a cell that is no number.
    """
    if path.suffix.lower() in REPORTS:
        raise InputError(
            "a report in Nsight's own form: `nsys export --type sqlite` makes one that can be read", file=path
        )
    sums, known = _Sums(), 0
    for section in sections(path):
        if section.skipped:
            sums.ignored.append(f"{path.name}: line {section.line}: nsys skipped a report: {section.skipped}")
        elif section.rows:
            known += _add(section, sums, path)
    if not known:
        why = f": {sums.ignored[0]}" if sums.ignored else "; `nsys stats --report cuda_gpu_kern_sum` prints one"
        why = "; SQL statements are not run: give the .sqlite file" if looks_like_sql(path) else why
        raise InputError(f"no table of `nsys stats` with rows in it{why}", file=path)
    recording = None
    if len(sums.device.work):
        recording = sums.device.recording(
            "nsys stats", path.name, rank=rank_in_name(path), world_size=None, device_names={}, on_cpu=False
        )
    trace = _trace(path, sums) if any(sums.tables.values()) else None
    return Stats(trace=trace, recording=recording, warnings=tuple(sums.warnings), ignored=tuple(sums.ignored))


def looks_like_sql(path: Path) -> bool:
    """Whether a text is a schema or dump of a database."""
    return "CREATE TABLE" in read_head(path).text.upper()


def _add(section: Section, sums: _Sums, path: Path) -> int:
    """1 where the table is one of those that are known."""
    if section.index("start") is not None and section.index("duration") is not None:
        return _add_device_work(section, sums, path)
    if section.index("type") is not None and section.index("calls") is not None:
        return _add_nvprof(section, sums, path)
    table, name = _table(section)
    if not table:
        headings = ", ".join(column.name for column in section.columns)[:100]
        sums.ignored.append(f"{path.name}: line {section.line}: a table that is not read: {headings}")
        return 0
    total = section.index("total proj time", "total time", "total")
    count = section.index("instances", "num calls", "range instances", "count", "kern inst")
    if total is None or count is None or name is None:
        raise InputError("expected columns with a name, a total and a count", file=path, line=section.line)
    unit = section.columns[total].unit
    sizes = section.columns[total].name == "total"
    if not unit and not sizes:
        sums.warnings.append(f"{path.name}: line {section.line}: times without a unit are taken as nanoseconds")
    for line, cells in section.rows:
        value, calls = _number(cells[total], path, line), integer(_number(cells[count], path, line))
        try:
            seconds = 0.0 if sizes else seconds_of_unit(value, unit or "ns")
            size = bytes_of_unit(value, unit or "mb") if sizes else 0.0
        except ValueError as error:
            raise InputError(str(error), file=path, line=section.line) from error
        if sizes:
            sums.bytes[cells[name]] = sums.bytes.get(cells[name], 0.0) + size
        else:
            _sum(sums.tables[table], cells[name], seconds, max(calls, 0))
            sums.least_and_median.setdefault(cells[name], _least_and_median(section, cells, unit))
    if not sizes:
        _doubt(section, total, count, sums, path)
    return 1


def _table(section: Section) -> tuple[str, int | None]:
    """Which table of sums a section is, and its column of names."""
    if section.index("total proj time") is not None:
        return "projected", section.index("range", "name")
    if section.index("category") is not None and section.index("operation") is not None:
        return "kernels", section.index("operation")
    if section.index("operation") is not None:
        return "copies", section.index("operation")
    if section.index("range") is not None and section.index("style") is not None:
        return "ranges", section.index("range")
    if section.index("nvtx range") is not None:
        return "", None  # kernels by range: those of the range stand in the sums of kernels already
    if section.index("num calls") is not None:
        return "calls", section.index("name")
    if section.index("instances") is not None:
        return "kernels", section.index("name")
    return "", None


def _add_device_work(section: Section, sums: _Sums, path: Path) -> int:
    """`cuda_gpu_trace`: one row for each kernel and copy."""
    start, length, name = section.index("start"), section.index("duration"), section.index("name")
    stream, device, size = section.index("strm", "stream"), section.index("device"), section.index("bytes", "size")
    if start is None or length is None or name is None or stream is None:
        headings = ", ".join(column.name for column in section.columns)[:100]
        sums.ignored.append(f"{path.name}: line {section.line}: a table that is not read: {headings}")
        return 0
    devices: dict[str, int] = {}
    for line, cells in section.rows:
        text = cells[name]
        kind = MEMCPY if "memcpy" in text.lower() else MEMSET if "memset" in text.lower() else ""
        amount = number_of(cells[size]) if size is not None else None
        times = []
        for column in (start, length):
            try:
                seconds = seconds_of_unit(_number(cells[column], path, line), section.columns[column].unit or "ns")
            except ValueError as error:
                raise InputError(str(error), file=path, line=section.line) from error
            times.append(nanoseconds_of_seconds(seconds))
        if sum(times) > _MOST_NS:
            raise InputError("a time beyond any clock", file=path, line=line)
        number = devices.setdefault(cells[device] if device is not None else "", len(devices))
        sums.device.add_work(
            (times[0], times[0] + times[1]),
            Stream(number, cells[stream]),
            text,
            CLASS_INDEX[kind] if kind else BY_NAME,
            size_bytes=round(bytes_of_unit(amount, section.columns[size].unit or "mb"))
            if size is not None and amount is not None and kind
            else -1,
        )
    return 1


def _add_nvprof(section: Section, sums: _Sums, path: Path) -> int:
    """nvprof --csv: the first row has the units."""
    kind, total, count, name = (section.index(word) for word in ("type", "time", "calls", "name"))
    if kind is None or total is None or count is None or name is None:
        raise InputError("expected the columns Type, Time, Calls and Name of nvprof", file=path, line=section.line)
    (_, units), *rows = section.rows
    for line, cells in rows:
        try:
            seconds = seconds_of_unit(_number(cells[total], path, line), units[total])
        except ValueError as error:
            raise InputError(str(error), file=path, line=section.line + 1) from error
        copied = cells[name].lower().startswith(("[cuda memcpy", "[cuda memset"))
        table = "calls" if cells[kind].lower().startswith("api") else "copies" if copied else "kernels"
        _sum(sums.tables[table], cells[name], seconds, max(integer(_number(cells[count], path, line)), 0))
    return 1


def _least_and_median(section: Section, cells: tuple[str, ...], unit: str) -> tuple[float, float]:
    """Seconds of one call; where a table does not say, the mean of its calls stands for both (0 where it has none)."""
    mean = section.index("avg", "average")
    found = []
    for column in (section.index("min", "minimum"), section.index("med", "median")):
        chosen = column if column is not None else mean
        value = number_of(cells[chosen]) if chosen is not None else None
        found.append(seconds_of_unit(value or 0.0, unit or "ns"))
    return found[0], found[1]


def _sum(table: Sums, name: str, seconds: float, count: int) -> None:
    before, calls = table.get(name, (0.0, 0))
    table[name] = (before + seconds, calls + count)


def _number(cell: str, path: Path, line: int) -> float:
    value = number_of(cell)
    if value is None:
        raise InputError(f"expected a number, found '{cell[:40]}'", file=path, line=line)
    return value


def _doubt(section: Section, total: int, count: int, sums: _Sums, path: Path) -> None:
    """Totals that their own counts, least and most contradict; shares of a table that was cut."""
    least, most, share = section.index("min", "minimum"), section.index("max", "maximum"), section.index("share")
    wrong = 0
    for _, cells in section.rows:
        values = [number_of(cells[column]) if column is not None else None for column in (total, count, least, most)]
        known = [value for value in values if value is not None]
        if len(known) == 4:
            wrong += not known[1] * known[2] <= known[0] * _ROUNDING or not known[0] <= known[1] * known[3] * _ROUNDING
    if wrong:
        rows = counted(wrong, "row")
        sums.warnings.append(f"{path.name}: in {rows} the total is not between count x min and count x max: edited?")
    if share is not None:
        sum_of_shares = sum(number_of(cells[share]) or 0.0 for _, cells in section.rows)
        if sum_of_shares < 100 - max(_SHARES_LOST, 0.05 * len(section.rows)):
            lost = f"the shares add up to {sum_of_shares:.0f} %, not 100 %: rows are missing"
            sums.warnings.append(f"{path.name}: line {section.line}: {lost}")


def _trace(path: Path, sums: _Sums) -> RankTrace:
    """The sums in the form of a record; what needs times is empty."""
    classes: Sums = {}
    messages: dict[str, list[str]] = {}
    for name, (seconds, count) in sums.tables["kernels"].items():
        lower = name.lower()
        copy = MEMCPY if "memcpy" in lower else MEMSET if "memset" in lower else ""
        kind = copy or kernel_class(name)
        _sum(classes, kind, seconds, count)
        if kind == COMMUNICATION:
            messages.setdefault(collective(name), []).append(name)
    for name, (seconds, count) in sums.tables["copies"].items():
        _sum(classes, MEMSET if "memset" in name.lower() else MEMCPY, seconds, count)
    parts: dict[str, PartTime] = {}
    for name, (seconds, count) in sums.tables["projected"].items():
        found = part_of(name)
        if found is not None:
            part = found[0]
            back = "backward" in name.lower() or "bwd" in name.lower()
            before = parts.get(part, PartTime(name=part, calls=0, forward_s=0.0, backward_s=0.0))
            parts[part] = PartTime(
                name=part,
                calls=max(before.calls, 0 if back else count),
                forward_s=before.forward_s + (0.0 if back else seconds),
                backward_s=before.backward_s + (seconds if back else 0.0),
            )
    return RankTrace(
        file=path.name,
        source="nsys stats",
        rank=rank_in_name(path),
        classes=tuple(ClassTime(name=n, seconds=s, count=c) for n, s, c in _ranked(classes)),
        parts=tuple(parts.values()),
        kernels=_times(sums.tables["kernels"]),
        host_ranges=_times(sums.tables["ranges"]),
        calls=_times(sums.tables["calls"]),
        messages=tuple(_message(what, names, sums) for what, names in messages.items()),
        copies=tuple(
            CopyTime(kind=name, bytes=round(sums.bytes.get(name, 0.0)), seconds=seconds, count=count)
            for name, seconds, count in _ranked(sums.tables["copies"])
        ),
    )


def _message(what: str, names: list[str], sums: _Sums) -> MessageTime:
    """All kernels of a collective; the tables have no sizes."""
    rows = [sums.tables["kernels"][name] for name in names]
    times = [sums.least_and_median.get(name, (0.0, 0.0)) for name in names]
    return MessageTime(
        collective=what,
        bytes=None,
        ranks=None,
        group="",
        count=sum(count for _, count in rows),
        seconds=sum(seconds for seconds, _ in rows),
        fastest_s=min(least for least, _ in times),
        median_s=sorted(median for _, median in times)[len(times) // 2],
    )


def _ranked(table: Sums) -> list[tuple[str, float, int]]:
    """(name, seconds, count) by seconds; names that look alike in a table are one."""
    merged: Sums = {}
    for name, (seconds, count) in table.items():
        _sum(merged, short_name(name), seconds, count)
    order = sorted(merged.items(), key=lambda item: (-item[1][0], item[0]))[:MOST_ROWS]
    return [(name, seconds, count) for name, (seconds, count) in order]


def _times(table: Sums) -> tuple[OperatorTime, ...]:
    return tuple(OperatorTime(name=name, seconds=seconds, count=count) for name, seconds, count in _ranked(table))
