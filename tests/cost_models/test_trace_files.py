"""Real traces, where they are at hand: each gives the reading that its manifest implies, or a right refusal."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mmplan.commands.import_kinds import read_files
from mmplan.errors import InputError

FILES = (Path(__file__).parents[2] / ".." / "shared" / "data" / "files").resolve()

pytestmark = pytest.mark.skipif(not FILES.exists(), reason="the folder of real files is not here")


def kineto(number: str) -> tuple[dict[str, Any], str, str]:
    """(the rank's record, warnings, ignored)."""
    (path,) = (FILES / "kineto").glob(f"{number}_*")
    reading = read_files([str(path)])
    document: Any = reading.fragment
    assert reading.kind == "kineto"
    return document["ranks"][0], " ".join(reading.warnings), " ".join(reading.ignored)


def messages(rank: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rank["messages"]:
        found[row["collective"]] = found.get(row["collective"], 0) + row["count"]
    return found


def test_a_trace_of_rocm() -> None:
    rank, warnings, _ = kineto("01")
    assert (rank["device"], len(rank["step_s"]), rank["rank"]) == ("AMD Radeon Graphics", 2, None)
    assert {row["name"]: row["count"] for row in rank["classes"]} == {
        "elementwise": 11, "memcpy": 2, "gemm": 2, "optimizer": 1,
    }  # fmt: skip
    assert [row["name"] for row in rank["phases"]] == ["forward", "backward", "optimizer", "other"]
    assert "no distributedInfo" in warnings


def test_a_trace_of_a_run_on_the_cpu() -> None:
    rank, _, ignored = kineto("02")
    assert (rank["rank"], rank["world_size"], rank["devices"]) == (34, 300, [])
    assert messages(rank) == {"all_reduce": 10}
    assert {row["bytes"] for row in rank["messages"]} == {4 * 321_271, 4 * 2_082_411}
    assert "no device work" not in ignored


def test_an_old_trace_whose_kernels_name_no_sizes() -> None:
    rank, _, _ = kineto("04")
    assert (rank["rank"], rank["world_size"], len(rank["step_s"])) == (0, 128, 2)
    assert messages(rank)["all_to_all"] == 4
    assert 400 * 2**20 in {row["bytes"] for row in rank["messages"]}


@pytest.mark.parametrize(("number", "steps"), [("06", 2), ("07", 1), ("11", 1)])
def test_tiny_traces(number: str, steps: int) -> None:
    rank, _, _ = kineto(number)
    assert len(rank["step_s"]) == steps and rank["kernels"]


def test_a_step_that_outlasts_the_profile_ends_with_it() -> None:
    rank, _, _ = kineto("07")
    assert rank["step_s"][0] < 0.36  # the mark says 13 s


@pytest.mark.parametrize(("number", "rank"), [("08", None), ("09", 0)])
def test_traces_without_device_work_give_no_costs(number: str, rank: int | None) -> None:
    found, _, ignored = kineto(number)
    assert (found["rank"], found["devices"], found["classes"]) == (rank, [], [])
    assert messages(found) == {"all_to_all": 6} and {row["seconds"] for row in found["messages"]} == {None}
    assert found["step_s"] == [0.075473] and found["host_ranges"]
    assert "no device work although the job ran on GPUs" in ignored


def test_kernels_that_carry_their_message_sizes() -> None:
    rank, _, _ = kineto("10")
    assert messages(rank) == {"all_reduce": 15, "broadcast": 6}
    sizes = {row["bytes"]: row["ranks"] for row in rank["messages"] if row["collective"] == "all_reduce"}
    assert sizes[4 * 6_637_568] == 2
    assert rank["devices"][0]["communication_s"] == pytest.approx(0.0468765, rel=1e-4)
    assert sum(row["seconds"] for row in rank["phases"]) > 0.15


@pytest.mark.parametrize("number", ["13", "14"])
def test_excerpts_are_said_to_be_filtered(number: str) -> None:
    rank, warnings, _ = kineto(number)
    assert "it was filtered or cut" in warnings
    assert rank["messages"][0]["bytes"]


def test_deep_ep_is_communication() -> None:
    rank, _, _ = kineto("19")
    assert (rank["device"], rank["world_size"]) == ("NVIDIA H800", 64)
    assert messages(rank) == {"all_to_all": 12}


@pytest.mark.parametrize("number", ["12", "16"])
def test_excerpts_without_calls_of_the_driver_name_no_cause(number: str) -> None:
    _, warnings, _ = kineto(number)
    assert "no calls of the driver are recorded" in warnings


def nsys(name: str) -> Any:
    return read_files([str(FILES / "nsys" / name)])


def test_a_table_of_kernels() -> None:
    reading = nsys("01_kern_sum_csv_with_gemm.csv")
    (rank,) = reading.fragment["ranks"]
    assert (reading.kind, reading.warnings) == ("nsys", ())
    assert {row["name"]: (row["seconds"], row["count"]) for row in rank["classes"]} == {
        "attention": (0.0993858, 32), "gemm": (0.0493281, 225), "elementwise": (0.0487042, 289),
        "norm": (0.000992557, 63),
    }  # fmt: skip


def test_a_table_behind_what_nsys_prints_first() -> None:
    (rank,) = nsys("03_kern_sum_csv_with_preamble_and_quotes.csv").fragment["ranks"]
    assert [(row["name"], row["count"]) for row in rank["classes"]] == [("gemm", 744), ("other", 10)]
    assert rank["kernels"][0]["name"] == "moe_gate_up_mid_q4K_tile8_mma_kernel<(unsigned int)512, (bool)1>"


@pytest.mark.parametrize("name", ["04_sqlite_schema_subset.sql", "05_nvprof_old_schema.sql"])
def test_schemas_are_refused_as_text_and_read_as_databases(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="SQL statements are not run"):
        nsys(name)
    nvprof = "nvprof" in name
    with closing(sqlite3.connect(tmp_path / "p.sqlite")) as connection, connection:
        connection.executescript((FILES / "nsys" / name).read_text())
        strings, key = ("StringTable", "_id_") if nvprof else ("StringIds", "id")
        connection.execute(f"INSERT INTO {strings} ({key}, value) VALUES (4, 'ampere_sgemm_128x64_nn')")
        table = connection.execute("PRAGMA table_info(CUPTI_ACTIVITY_KIND_KERNEL)").fetchall()
        filled = {"start": 1_000, "end": 5_000, "name": 4, "shortName": 4, "demangledName": 4, "streamId": 7}
        row = [filled.get(column[1], None if column[1] == "_id_" else 0) for column in table]
        connection.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({', '.join('?' * len(row))})", row)
    reading: Any = read_files([str(tmp_path / "p.sqlite")])
    (rank,) = reading.fragment["ranks"]
    assert rank["source"] == ("nvprof" if nvprof else "nsys")
    assert rank["kernels"] == [{"name": "ampere_sgemm_128x64_nn", "seconds": 4e-6, "count": 1}]


def test_a_small_chakra_trace() -> None:
    reading: Any = read_files([str(FILES / "chakra" / "01_small_chakra.0.json")])
    (rank,) = reading.fragment["ranks"]
    assert (reading.kind, rank["rank"]) == ("chakra", 0)
    assert {row["name"]: row["seconds"] for row in rank["classes"]} == {"communication": 28e-6, "elementwise": 4e-6}
    assert {row["name"]: row["seconds"] for row in rank["operators"]} == {
        "aten::flatten_dense_tensors": 499e-6, "c10d::broadcast_": 164e-6,
    }  # fmt: skip


def test_an_execution_trace_of_pytorch_has_no_times() -> None:
    reading: Any = read_files([str(FILES / "chakra" / "02_pytorch_execution_trace_simple_add.json")])
    (rank,) = reading.fragment["ranks"]
    assert rank["source"] == "pytorch execution trace" and rank["classes"] == []
    assert {row["name"]: row["count"] for row in rank["operators"]}["aten::add"] == 2
    assert "holds no times" in " ".join(reading.ignored)


def test_the_plug_in_of_nccl() -> None:
    reading: Any = read_files([str(FILES / "kineto" / "20_nccl_profiler_plugin_chrome_trace_excerpt.json")])
    (rank,) = reading.fragment["ranks"]
    assert reading.kind == "nccl-profiler"
    assert [(row["collective"], row["bytes"], row["seconds"]) for row in rank["messages"]] == [
        ("all_reduce", 4 * 2_097_152, None)
    ]
