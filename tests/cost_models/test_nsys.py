"""Profiles of Nsight Systems and nvprof: databases that are never trusted, and the tables that `nsys stats` prints."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmplan.commands.import_kinds import read_files
from mmplan.cost_models.formats.trace_reading import read_nsys
from mmplan.errors import InputError

MS = 1_000_000
GEMM, ALL_REDUCE, LOCK, LAUNCH, SYNC, STEP, VISION = range(1, 8)
STRINGS = {
    GEMM: "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
    ALL_REDUCE: "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    LOCK: "pthread_mutex_lock",
    LAUNCH: "cudaLaunchKernel_v7000",
    SYNC: "cudaStreamSynchronize_v3020",
    STEP: "iteration 7",
    VISION: "vision_tower",
}
SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER, streamId
INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER, returnValue INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, bytes INTEGER,
    copyKind INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER);
CREATE TABLE OSRT_API (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER);
"""
INSERT = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "(?, ?, ?, ?, ?, ?, ?, ?)",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "(?, ?, ?, ?, ?, ?)",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "(?, ?, ?, ?, ?, ?)",
    "NVTX_EVENTS": "(?, ?, ?, ?, ?, ?)",
    "OSRT_API": "(?, ?, ?, ?, ?)",
}


def of_process(process: int, thread: int = 1) -> int:
    return (process << 24) | thread


def database(path: Path, rows: dict[str, list[tuple[Any, ...]]], schema: str = SCHEMA) -> Path:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(schema)
        connection.executemany("INSERT INTO StringIds VALUES (?, ?)", STRINGS.items())
        connection.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H100 80GB HBM3')")
        for table, values in rows.items():
            connection.executemany(f"INSERT INTO {table} VALUES {INSERT[table]}", values)
    return path


def a_step(process: int = 9, device: int = 0) -> dict[str, list[tuple[Any, ...]]]:
    """20 ms: a product of 6 ms inside vision_tower, an all-reduce of 4 ms half under it, 10 ms idle after a
    synchronise.
    """
    pid, tid = of_process(process, 0), of_process(process)
    return {
        "CUPTI_ACTIVITY_KIND_KERNEL": [
            (2 * MS, 8 * MS, device, 7, 1, pid, GEMM, GEMM),
            (6 * MS, 10 * MS, device, 20, 2, pid, ALL_REDUCE, ALL_REDUCE),
        ],
        "CUPTI_ACTIVITY_KIND_RUNTIME": [
            (1 * MS, 1 * MS + 5_000, tid, 1, LAUNCH, 0),
            (3 * MS, 3 * MS + 5_000, tid, 2, LAUNCH, 0),
            (4 * MS, 10 * MS + 1_000, tid, 3, SYNC, 0),
        ],
        "NVTX_EVENTS": [(0, 20 * MS, 59, None, STEP, tid), (MS // 2, 2 * MS, 59, "vision_tower", None, tid)],
    }


def ranks(reading: Any) -> list[dict[str, Any]]:
    return list(reading.fragment["ranks"])


def test_a_database_gives_what_a_trace_gives(tmp_path: Path) -> None:
    reading = read_files([str(database(tmp_path / "rank-3.sqlite", a_step()))])
    (rank,) = ranks(reading)
    assert (reading.kind, rank["source"], rank["rank"], rank["device"]) == ("nsys", "nsys", 3, "NVIDIA H100 80GB HBM3")
    (device,) = rank["devices"]
    assert (device["compute_s"], device["exposed_communication_s"], device["communication_s"]) == (6e-3, 2e-3, 4e-3)
    assert rank["parts"] == [{"name": "vision", "calls": 1, "forward_s": 6e-3, "backward_s": 0.0}]
    assert {row["name"] for row in rank["calls"]} == {"cudaLaunchKernel", "cudaStreamSynchronize"}


def test_steps_are_ranges_and_the_gap_names_the_synchronisation(tmp_path: Path) -> None:
    rows = a_step()
    rows["NVTX_EVENTS"] += [(20 * MS, 40 * MS, 59, "iteration 8", None, of_process(9))]
    (rank,) = ranks(read_nsys([database(tmp_path / "p.sqlite", rows)]))
    assert (rank["marked_by"], rank["step_s"]) == ("iteration #", [0.02, 0.02])
    (gap,) = rank["gaps"]
    assert (gap["begin_s"], gap["length_s"]) == (0.01, 0.03)
    assert gap["cause"] == "nothing recorded on the host after cudaStreamSynchronize"


def test_dense_waits_for_a_mutex_are_found_with_their_rate(tmp_path: Path) -> None:
    rows = a_step()
    rows["OSRT_API"] = [
        (12 * MS + 20_000 * i, 12 * MS + 20_000 * i + 4_000, of_process(9, 1 + i % 3), None, LOCK) for i in range(100)
    ]
    reading = read_nsys([database(tmp_path / "p.sqlite", rows)])
    (cluster,) = ranks(reading)[0]["locks"]
    assert (cluster["name"], cluster["waits"], cluster["threads"]) == ("pthread_mutex_lock", 100, 3)
    assert 49 < cluster["per_ms"] < 51
    assert cluster["cause"] == "a mutex that 3 threads contend for"
    assert any("100 short waits in pthread_mutex_lock" in sentence for sentence in reading.warnings)


def test_a_lock_inside_calls_of_the_driver_is_the_drivers(tmp_path: Path) -> None:
    rows = a_step()
    starts = [12 * MS + 20_000 * i for i in range(100)]
    rows["OSRT_API"] = [(at, at + 4_000, of_process(9), None, LOCK) for at in starts]
    rows["CUPTI_ACTIVITY_KIND_RUNTIME"] += [(at - 2_000, at + 8_000, of_process(9), 50, LAUNCH, 0) for at in starts]
    (cluster,) = ranks(read_nsys([database(tmp_path / "p.sqlite", rows)]))[0]["locks"]
    assert cluster["cause"].startswith("the driver's own lock inside cudaLaunchKernel")


def test_two_dense_stretches_far_apart_are_two(tmp_path: Path) -> None:
    tid = of_process(9)
    waits = [(at + 50_000 * n, at + 50_000 * n + 40_000, tid, 0, LOCK) for at in (MS, 15 * MS) for n in range(20)]
    (rank,) = ranks(read_files([str(database(tmp_path / "a.sqlite", {**a_step(), "OSRT_API": waits}))]))
    assert [(lock["waits"], round(lock["per_ms"])) for lock in rank["locks"]] == [(20, 20), (20, 20)]


def test_tables_with_a_version_behind_their_names_are_the_same_tables(tmp_path: Path) -> None:
    plain = ranks(read_files([str(database(tmp_path / "a.sqlite", a_step()))]))
    schema, rows = SCHEMA, {}
    for table, values in a_step().items():
        schema = schema.replace(f"CREATE TABLE {table} ", f"CREATE TABLE {table}_V12 ")
        rows[f"{table}_V12"] = values
        INSERT[f"{table}_V12"] = INSERT[table]
    versioned = ranks(read_files([str(database(tmp_path / "b.sqlite", rows, schema))]))
    assert [rank | {"file": ""} for rank in versioned] == [rank | {"file": ""} for rank in plain]


def test_what_a_database_lacks_is_told_in_the_words_of_its_profiler(tmp_path: Path) -> None:
    rows = a_step()
    del rows["CUPTI_ACTIVITY_KIND_KERNEL"]
    told = " ".join(read_files([str(database(tmp_path / "a.sqlite", rows))]).ignored)
    assert "record with --trace=cuda,nvtx" in told and "ProfilerActivity" not in told


def test_processes_of_one_file_are_ranks_by_their_devices(tmp_path: Path) -> None:
    first, second = a_step(9, 1), a_step(8, 0)
    both = {table: first[table] + second[table] for table in first}
    reading = read_nsys([database(tmp_path / "p.sqlite", both)])
    assert [(rank["rank"], rank["file"]) for rank in ranks(reading)] == [
        (0, "p.sqlite process 8"),
        (1, "p.sqlite process 9"),
    ]
    assert any("its rank is taken to be its device, 1" in sentence for sentence in reading.warnings)


def test_rows_with_impossible_times_are_counted_and_left_out(tmp_path: Path) -> None:
    rows = a_step()
    rows["CUPTI_ACTIVITY_KIND_KERNEL"] += [
        (9 * MS, 8 * MS, 0, 7, 5, of_process(9), GEMM, GEMM),
        (0, 0, 0, 7, 5, of_process(9), GEMM, GEMM),
        ("soon", 5, 0, 7, 5, of_process(9), GEMM, GEMM),
        (2**62, 2**62 + 1, 0, 7, 5, of_process(9), GEMM, GEMM),
    ]
    rows["NVTX_EVENTS"] += [(5, None, 59, "never ended", None, of_process(9))]
    reading = read_nsys([database(tmp_path / "p.sqlite", rows)])
    told = " ".join(reading.ignored)
    for words in ("a negative duration", "no whole nanoseconds", "beyond any clock", "did not finish"):
        assert words in told
    assert ranks(reading)[0]["classes"][0]["count"] == 1


NVPROF = """
CREATE TABLE StringTable (_id_ INTEGER PRIMARY KEY AUTOINCREMENT, value TEXT NOT NULL UNIQUE);
CREATE TABLE Version (version INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL (_id_ INTEGER PRIMARY KEY, start INT NOT NULL, end INT NOT NULL,
    completed INT NOT NULL, deviceId INT NOT NULL, contextId INT, streamId INT NOT NULL, correlationId INT NOT NULL,
    name INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (_id_ INTEGER PRIMARY KEY, cbid INT, start INT, end INT, processId INT,
threadId INT, correlationId INT, returnValue INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MARKER (_id_ INTEGER PRIMARY KEY, timestamp INT, id INT, name INT);
INSERT INTO StringTable (value) VALUES ('volta_sgemm_64x64_nn'), ('iteration 1');
INSERT INTO CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL VALUES (1, 2000000, 8000000, 0, 0, 1, 7, 5, 1);
INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1, 211, 1000000, 1005000, 3, 4, 5, 0), (2, 165, 1500000, 8005000, 3, 4,
6, 0); INSERT INTO CUPTI_ACTIVITY_KIND_MARKER VALUES (1, 900000, 44, 2), (2, 9000000, 44, 0);
"""


def test_a_database_of_nvprof_is_told_apart_and_read(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "p.nvvp")) as connection, connection:
        connection.executescript(NVPROF)
    (rank,) = ranks(read_files([str(tmp_path / "p.nvvp")]))
    assert (rank["source"], rank["kernels"][0]["name"], rank["kernels"][0]["seconds"]) == (
        "nvprof", "volta_sgemm_64x64_nn", 6e-3,
    )  # fmt: skip
    assert [row["name"] for row in rank["calls"]] == ["cudaDeviceSynchronize"]  # the launch was before the window
    assert [row["name"] for row in rank["host_ranges"]] == ["iteration 1"]


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("CREATE TABLE history (url TEXT)", "neither Nsight Systems nor nvprof"),
        ("CREATE TABLE StringIds (id INTEGER, value TEXT)", "its tables hold no kernel"),
        (
            "CREATE TABLE StringIds (id INTEGER, value TEXT); CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS "
            "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS start, x AS end FROM c",
            "is a view or virtual",
        ),
        (
            "CREATE TABLE StringIds (id INTEGER, value TEXT); CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, "
            "end INT GENERATED ALWAYS AS (length(hex(zeroblob(4000))))); "
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start) VALUES (1)",
            "its tables hold no kernel",  # computed columns are not read
        ),
    ],
)
def test_databases_that_are_no_profile_are_refused(tmp_path: Path, script: str, sentence: str) -> None:
    with closing(sqlite3.connect(tmp_path / "p.sqlite")) as connection, connection:
        connection.executescript(script)
    with pytest.raises(InputError, match=sentence):
        read_nsys([tmp_path / "p.sqlite"])


def test_a_database_is_not_written_to_and_no_journal_appears(tmp_path: Path) -> None:
    path = database(tmp_path / "a ?mode=rwc#.sqlite", a_step())
    before = path.read_bytes()
    read_nsys([path])
    assert path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == [path.name]


KERNELS = """Processing [/data/a.sqlite] with [/opt/nsight/reports/cuda_gpu_kern_sum.py]...

Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
75.0,3000000,30,100000.0,100000.0,90000,110000,1.0,"void cutlass::Kernel2<a, b>(int, float)"
25.0,1000000,10,100000.0,95000.0,90000,110000,1.0,ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)

Processing [/data/a.sqlite] with [/opt/nsight/reports/cuda_api_sum.py]...

Time (%),Total Time (ns),Num Calls,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
100.0,500000,5,100000.0,100000.0,90000,110000,1.0,cudaStreamSynchronize

Processing [/data/a.sqlite] with [/opt/nsight/reports/nvtx_gpu_proj_sum.py]...

Range,Style,Total Proj Time (ns),Total Range Time (ns),Range Instances,Proj Avg (ns)
:vision_tower,PushPop,600000,900000,6,100000.0
:language_model,PushPop,1200000,1500000,6,200000.0
:language_model backward,PushPop,2400000,2500000,6,400000.0
"""


def text_file(folder: Path, text: str) -> Path:
    path = folder / "stats.csv"
    path.write_text(text)
    return path


def test_tables_of_several_reports_in_one_file(tmp_path: Path) -> None:
    reading = read_files([str(text_file(tmp_path, KERNELS))])
    (rank,) = ranks(reading)
    assert {row["name"]: (row["seconds"], row["count"]) for row in rank["classes"]} == {
        "gemm": (3e-3, 30),
        "communication": (1e-3, 10),
    }
    assert rank["messages"][0]["fastest_s"] == 9e-5 and rank["messages"][0]["median_s"] == 9.5e-5
    assert rank["calls"] == [{"name": "cudaStreamSynchronize", "seconds": 5e-4, "count": 5}]
    assert {part["name"]: (part["calls"], part["forward_s"], part["backward_s"]) for part in rank["parts"]} == {
        "vision": (6, 6e-4, 0.0),
        "text": (6, 1.2e-3, 2.4e-3),
    }
    assert rank["devices"] == [] and any("nsys export --type sqlite" in sentence for sentence in reading.ignored)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (
            "Time(%),Total Time (ns),Instances,Average,Minimum,Maximum,Name\n100.0,2000000,2,1,1,2000000,sgemm_nn\n",
            2e-3,
        ),
        ("Time (%),Total Time (us),Instances,Avg (us),Name\n100.0,2000.0,2,1000,sgemm_nn\n", 2e-3),
        ("Time (%),Total Time (ms),Instances,Avg (ms),Name\n100.0,2,2,1,a gemm, of two commas, unquoted\n", 2e-3),
        ('"Time (%)","Total Time (ns)","Instances","Avg (ns)","Name"\n"100.0","2,000,000","2","1","sgemm_nn"\n', 2e-3),
        (
            '==7== Profiling result:\n"Type","Time(%)","Time","Calls","Avg","Min","Max","Name"\n,%,ms,,us,us,us,\n'
            '"GPU activities",100.0,2.0,2,1,1,1,"sgemm_nn"\n"API calls",9.0,9.0,1,9,9,9,"cudaMalloc"\n',
            2e-3,
        ),
        (
            " ** CUDA GPU Kernel Summary (cuda_gpu_kern_sum):\n\n"
            " Time (%)  Total Time (ns)  Instances  Avg (ns)    Name\n"
            " --------  ---------------  ---------  --------  --------\n"
            "    100.0        2,000,000          2       1.0  sgemm_nn<int, 3>\n",
            2e-3,
        ),
    ],
)
def test_headings_of_other_versions_and_units(tmp_path: Path, text: str, seconds: float) -> None:
    (rank,) = ranks(read_nsys([text_file(tmp_path, text)]))
    assert [(row["name"], row["seconds"], row["count"]) for row in rank["classes"]] == [("gemm", seconds, 2)]


def test_a_table_with_times_is_a_recording(tmp_path: Path) -> None:
    text = (
        "Start (ns),Duration (ns),CorrId,GrdX,Bytes (MB),Device,Ctx,Strm,Name\n"
        "1000000,6000000,1,8,,NVIDIA A100 (0),1,7,ampere_sgemm_128x64_nn\n"
        "5000000,4000000,2,8,,NVIDIA A100 (0),1,20,ncclDevKernel_AllReduce_Sum\n"
        "9000000,1000000,3,,2.5,NVIDIA A100 (0),1,7,[CUDA memcpy HtoD]\n"
    )
    (rank,) = ranks(read_nsys([text_file(tmp_path, text)]))
    (device,) = rank["devices"]
    assert (device["compute_s"], device["exposed_communication_s"], device["exposed_copy_s"]) == (6e-3, 2e-3, 1e-3)
    assert rank["copies"][0]["bytes"] == 2_500_000


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("3000000,30", "3000000,3", "1 row the total is not between"),
        ("75.0,3000000", "35.0,3000000", "the shares add up to 60 %, not 100 %"),
        ("Total Time (ns),Instances", "Total Time,Instances", "taken as nanoseconds"),
        (KERNELS[:40], "SKIPPED: a.sqlite does not contain CUDA trace data.\n", "does not contain CUDA trace data"),
    ],
)
def test_doubtful_tables_are_said_to_be_so(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    reading = read_nsys([text_file(tmp_path, KERNELS.replace(old, new, 1))])
    assert any(sentence in told for told in [*reading.warnings, *reading.ignored])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no table of `nsys stats`"),
        ("a,b,c\n1,2,3\n", "no table of `nsys stats`"),
        ("SKIPPED: x.sqlite does not contain NV Tools Extension (NVTX) data.\n", "does not contain NV Tools"),
        (KERNELS.replace("3000000,30", "soon,30"), ":4: expected a number, found 'soon'"),
        (KERNELS.replace("75.0,3000000,30,100000.0", "75.0"), ":4: 6 cells, the heading in line 3 has 9"),
        (KERNELS.replace("Total Time (ns)", "Total Time (weeks)", 1), "found 'weeks'"),
        (KERNELS.replace("3000000,30", "3000000\r,30"), ":4: 0 cells, the heading in line 3 has 9"),
        ("Time (%),Total Time (ns),\rInstances,Name\n1,2,3,4\n", "no table of `nsys stats`"),
        ("CREATE TABLE StringIds (id INTEGER);\n", "SQL statements are not run"),
        ("Time (%),Total Time (ns),Instances,Name\n", "no table of `nsys stats` with rows"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        read_nsys([text_file(tmp_path, text)])
    assert sentence in str(caught.value)


def test_a_report_in_nsights_own_form_is_refused_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "a.nsys-rep").write_bytes(b"\x01\x02\x00binary")
    with pytest.raises(InputError, match="nsys export --type sqlite"):
        read_files([str(tmp_path / "a.nsys-rep")])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 40_000), st.binary(max_size=6)), min_size=1, max_size=8))
def test_a_database_with_other_bytes_gives_a_reading_or_a_refusal(
    tmp_path: Path, edits: list[tuple[int, bytes]]
) -> None:
    path = tmp_path / "p.sqlite"
    if not path.exists():
        database(path, a_step())
    content = bytearray(path.read_bytes())
    for at, new in edits:
        content[at : at + len(new)] = new
    (tmp_path / "m.sqlite").write_bytes(content)
    try:
        read_nsys([tmp_path / "m.sqlite"])
    except InputError:
        return
