"""SQLite files of nvprof (`nvprof -o file.nvvp`): table names as in Nsight Systems, other columns, one process."""

from mmplan.cost_models.formats.kineto_arguments import integer
from mmplan.cost_models.formats.profiler_tables import COPY_KINDS, KERNEL_TABLES, MOST_NS, MOST_STRINGS, ProfilerTables
from mmplan.cost_models.traces.recording import CALL, MARK

# Calls of the runtime by number (cupti_runtime_cbid.h); others are shown as their number.
_RUNTIME_CALLS = {
    20: "cudaMalloc", 22: "cudaFree", 31: "cudaMemcpy", 41: "cudaMemcpyAsync", 131: "cudaStreamSynchronize",
    165: "cudaDeviceSynchronize", 211: "cudaLaunchKernel",
}  # fmt: skip
_CALLS: dict[str, dict[int, str]] = {"CUPTI_ACTIVITY_KIND_RUNTIME": _RUNTIME_CALLS, "CUPTI_ACTIVITY_KIND_DRIVER": {}}


def fill_from_nvprof(tables: ProfilerTables) -> None:
    """Kernels, copies, calls and ranges."""
    tables.read_strings("StringTable", "_id_")
    for table in KERNEL_TABLES:
        columns = ("deviceId", "streamId", "correlationId", "name")
        for times, (device, stream, correlation, name) in tables.rows(table, *columns):
            tables.add_work(times, 0, device, stream, tables.name(name), correlation=correlation)
    tables.add_copies("no process", COPY_KINDS)
    gathered = tables.process(0).gathered
    for table, known in _CALLS.items():
        what = table.rsplit("_", 1)[1].lower()
        for times, (thread, correlation, number) in tables.rows(table, "threadId", "correlationId", "cbid"):
            text = known.get(integer(number), f"{what} call {number}"[:60])
            gathered.add_host(times, str(thread)[:40], text, CALL, correlation=integer(correlation))
    # a range is two rows with one id, of which the first has the name
    begun: dict[int, tuple[int, str]] = {}
    for at, key, name in tables.database.rows("CUPTI_ACTIVITY_KIND_MARKER", ("timestamp", "id", "name")):
        number, at_ns = integer(key), integer(at)
        if number in begun and begun[number][0] <= at_ns < MOST_NS:
            begin_ns, text = begun.pop(number)
            gathered.add_host((begin_ns, at_ns), "ranges", text, MARK)
        elif 0 <= at_ns < MOST_NS and integer(name) > 0 and len(begun) < MOST_STRINGS:
            begun[number] = (at_ns, tables.name(name))
