"""SQLite files of Nsight Systems (`nsys export --type sqlite`): a recording for each process.

Every schema since 2020 keeps names in StringIds, and process and thread in one number (`globalTid`).
"""

import re
from contextlib import suppress
from pathlib import Path

from mmplan.cost_models.formats.kineto_arguments import integer
from mmplan.cost_models.formats.nvprof_sqlite import fill_from_nvprof
from mmplan.cost_models.formats.profiler_tables import (
    COPY_KINDS,
    KERNEL_TABLES,
    LONGEST_NAME,
    ProfilerTables,
    process_of,
)
from mmplan.cost_models.formats.sqlite_file import MAGIC, Database, opened_database
from mmplan.cost_models.traces.kernel_classes import CLASS_INDEX, OTHER
from mmplan.cost_models.traces.recording import CALL, MARK, SYSTEM, Recording
from mmplan.errors import InputError

_VERSION = re.compile(r"_v\d+$")  # cudaLaunchKernel_v7000
_RANGES = (59, 60)  # eventType of NVTX_EVENTS: push/pop and start/end ranges
_CALLS = {"CUPTI_ACTIVITY_KIND_RUNTIME": CALL, "CUPTI_ACTIVITY_KIND_DRIVER": CALL, "OSRT_API": SYSTEM}


def is_sqlite(path: Path) -> bool:
    """Whether the file begins like one; False where it cannot be read."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


def read_database(path: Path) -> tuple[Recording, ...]:
    """A recording for each process that used a device, or one of the host alone where none did.

    Raises:
        InputError: no SQLite file, of neither profiler, damaged, or without any event.
    """
    with opened_database(path) as database:
        tables = ProfilerTables(database)
        if "StringIds" in database:
            _fill(tables)
            return tables.recordings("nsys", _device_names(database))
        if "StringTable" in database and any(table in database for table in KERNEL_TABLES):
            fill_from_nvprof(tables)
            return tables.recordings("nvprof", {})
        found = ", ".join(sorted(database.tables)[:5]) or "no tables"
        message = f"an SQLite file of neither Nsight Systems nor nvprof, it has no StringIds or StringTable: {found}"
        raise InputError(message[:300], file=path)


def _fill(tables: ProfilerTables) -> None:
    tables.read_strings("StringIds", "id")
    for table in KERNEL_TABLES:
        _fill_kernels(tables, table)
    graphs = ("deviceId", "streamId", "correlationId", "globalPid", "graphId")
    for times, (device, stream, correlation, process, graph) in tables.rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", *graphs):
        name, kind = f"CUDA graph {graph}"[:60], CLASS_INDEX[OTHER]
        tables.add_work(times, process_of(process), device, stream, name, kind, correlation=correlation)
    labels = tables.database.rows("ENUM_CUDA_MEMCPY_OPER", ("id", "label"))
    tables.add_copies("globalPid", {**COPY_KINDS, **{integer(number): str(label)[:60] for number, label in labels}})
    for table, kind in _CALLS.items():
        for times, (thread, correlation, key) in tables.rows(table, "globalTid", "correlationId", "nameId"):
            gathered = tables.process(process_of(thread)).gathered
            name = _VERSION.sub("", tables.name(key))
            gathered.add_host(times, _thread_of(thread), name, kind, correlation=integer(correlation))
    for times, (event, text, key, thread) in tables.rows("NVTX_EVENTS", "eventType", "text", "textId", "globalTid"):
        if event is None or integer(event) in _RANGES:
            name = str(text)[:LONGEST_NAME] if text is not None else tables.name(key)
            tables.process(process_of(thread)).gathered.add_host(times, _thread_of(thread), name, MARK)


def _fill_kernels(tables: ProfilerTables, table: str) -> None:
    columns = ("deviceId", "streamId", "correlationId", "globalPid", "demangledName", "shortName", "name")
    for times, (device, stream, correlation, process, *names) in tables.rows(table, *columns):
        key = next((name for name in names if name is not None), None)
        tables.add_work(times, process_of(process), device, stream, tables.name(key), correlation=correlation)


def _thread_of(value: object) -> str:
    number = integer(value)
    return str(number & 0xFFFFFF) if number >= 0 else "no thread"


def _device_names(database: Database) -> dict[int, str]:
    """By the number that kernels have."""
    gpus = {integer(number): str(name)[:80] for number, name in database.rows("TARGET_INFO_GPU", ("id", "name"))}
    pairs = database.rows("TARGET_INFO_CUDA_DEVICE", ("cudaId", "gpuId"))
    return {**gpus, **{integer(cuda): gpus[integer(gpu)] for cuda, gpu in pairs if integer(gpu) in gpus}}
