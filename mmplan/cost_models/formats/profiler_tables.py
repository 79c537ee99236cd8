"""Tables of begin and end that Nsight Systems and nvprof share, process by process: times are nanoseconds."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from mmplan.cost_models.formats.kineto_arguments import integer
from mmplan.cost_models.formats.kineto_head import rank_in_name
from mmplan.cost_models.formats.sqlite_file import Database
from mmplan.cost_models.traces.gathering import BY_NAME, MOST_DISTINCT, Gathered, Times
from mmplan.cost_models.traces.kernel_classes import CLASS_INDEX, MEMCPY, MEMSET
from mmplan.cost_models.traces.recording import Recording, Stream
from mmplan.errors import InputError

MOST_ROWS = 40_000_000
MOST_STRINGS = 2_000_000
MOST_NS = 4 * 10**18
LONGEST_NAME = 4_000

KERNEL_TABLES = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL")
# copyKind of CUPTI (cupti_activity.h, CUpti_ActivityMemcpyKind).
COPY_KINDS = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH"}
COPY_KINDS |= {10: "PtoP"}


@dataclass(slots=True)
class Process:
    gathered: Gathered = field(default_factory=Gathered)
    devices: set[int] = field(default_factory=set)


class ProfilerTables:
    """A database and what has been found in it. `names`: strings by their number; `dropped`: rows without times."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.processes: dict[int, Process] = {}
        self.names: dict[int, str] = {}
        self.dropped: Counter[str] = Counter()
        self._of_device: dict[int, int] = {}
        self._count = 0

    def rows(self, table: str, *columns: str) -> Iterator[tuple[Times, list[object]]]:
        """(begin and end, these columns) of each row that has times."""
        for begin, end, *rest in self.database.rows(table, ("start", "end", *columns)):
            self._count += 1
            if self._count > MOST_ROWS:
                raise InputError(f"more than {MOST_ROWS:,} events: profile fewer steps", file=self.database.path)
            if (
                self._count % 1_000 == 0
                and sum(item.gathered.distinct for item in self.processes.values()) > MOST_DISTINCT
            ):
                raise InputError(f"more than {MOST_DISTINCT:,} different names and threads", file=self.database.path)
            times = _times(begin, end)
            if isinstance(times, str):
                self.dropped[times] += 1
            else:
                yield times, rest

    def process(self, number: int) -> Process:
        """Of that number; 0 where it is not known."""
        return self.processes.setdefault(max(number, 0), Process())

    def read_strings(self, table: str, key: str) -> None:
        for number, value in self.database.rows(table, (key, "value")):
            if integer(number) >= 0:
                self.names[integer(number)] = str(value)[:LONGEST_NAME]
            if len(self.names) > MOST_STRINGS:
                raise InputError(f"more than {MOST_STRINGS:,} strings", file=self.database.path)

    def name(self, key: object) -> str:
        return self.names.get(integer(key), f"name {key}"[:60])

    def add_work(
        self,
        times: Times,
        process: int,
        device: object,
        stream: object,
        name: str,
        kind: int = BY_NAME,
        *,
        correlation: object = None,
        size_bytes: object = None,
    ) -> None:
        """Work of a process (-1: not recorded; then that of the device's kernels, or the only one)."""
        number = max(integer(device), 0)
        if process < 0:
            process = self._of_device.get(number, next(iter(self.processes), 0))
        self._of_device.setdefault(number, process)
        owner = self.process(process)
        owner.devices.add(number)
        owner.gathered.add_work(
            times,
            Stream(number, str(stream)[:40]),
            name,
            kind,
            correlation=integer(correlation) or -1,
            size_bytes=integer(size_bytes),
        )

    def add_copies(self, process_column: str, kinds: dict[int, str]) -> None:
        """Copies and fills."""
        columns = ("deviceId", "streamId", "bytes", "correlationId", process_column)
        for times, (kind, *values) in self.rows("CUPTI_ACTIVITY_KIND_MEMCPY", "copyKind", *columns):
            label = kinds.get(integer(kind), "of unknown direction")
            self._add_copy(times, f"Memcpy {label}", MEMCPY, values)
        for times, values in self.rows("CUPTI_ACTIVITY_KIND_MEMSET", *columns):
            self._add_copy(times, "Memset", MEMSET, values)

    def _add_copy(self, times: Times, name: str, kind: str, values: list[object]) -> None:
        device, stream, size, correlation, owner = values
        self.add_work(
            times,
            process_of(owner),
            device,
            stream,
            name,
            CLASS_INDEX[kind],
            correlation=correlation,
            size_bytes=size,
        )

    def recordings(self, source: str, device_names: dict[int, str]) -> tuple[Recording, ...]:
        """Of processes with device work; of the one with most host rows where there are none.

        Raises:
            InputError: nothing was recorded.
        """
        path = self.database.path
        working = {number: item for number, item in sorted(self.processes.items()) if len(item.gathered.work)}
        if not working and any(len(item.gathered.host) for item in self.processes.values()):
            largest = max(self.processes.items(), key=lambda item: len(item[1].gathered.host))
            working = dict([largest])
        if not working:
            raise InputError("its tables hold no kernel, copy, call or range", file=path)
        alone = len(working) == 1
        own_devices = len({frozenset(item.devices) for item in working.values()}) == len(working)
        next(iter(working.values())).gathered.dropped.update(self.dropped)
        made = []
        for number, item in working.items():
            rank = rank_in_name(path) if alone else min(item.devices) if own_devices else None
            file = path.name if alone else f"{path.name} process {number}"
            doubts = () if alone or rank is None else (f"{file}: its rank is taken to be its device, {rank}",)
            recording = item.gathered.recording(
                source, file, rank=rank, world_size=None, device_names=device_names, on_cpu=False, warnings=doubts
            )
            made.append(recording)
        return tuple(made)


def process_of(value: object) -> int:
    """Process in bits 24 to 47 of Nsight Systems' globalTid or globalPid, -1 where there is none."""
    number = integer(value)
    return (number >> 24) & 0xFFFFFF if number >= 0 else -1


def _times(begin: object, end: object) -> Times | str:
    """(begin, end), or why they are none."""
    if end is None or begin is None:
        return "no end: they did not finish"
    if not isinstance(begin, int) or not isinstance(end, int):
        return "times that are no whole nanoseconds"
    if not 0 <= begin < MOST_NS or not 0 <= end < MOST_NS:
        return "times beyond any clock"
    if begin == end == 0:
        return "no times: they did not finish"
    return (begin, end) if end >= begin else "a negative duration"
