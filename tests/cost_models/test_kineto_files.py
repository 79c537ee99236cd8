"""Files of the PyTorch profiler: doubtful ones are said to be so, several ranks are one job, records read back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kineto_events import (
    ALL_REDUCE,
    GEMM,
    by_name,
    collective,
    kernel,
    launched,
    mark,
    only_rank,
    operator,
    span,
    two_steps,
    write,
)  # fmt: skip

from mmplan.cost_models.formats.trace_reading import read_kineto
from mmplan.cost_models.traces.record import SCHEMA, load_trace_record
from mmplan.errors import InputError
from mmplan.report.formats import fragment_text


def test_a_missing_distributed_info_is_a_warning_and_the_rank_is_in_the_name(tmp_path: Path) -> None:
    reading = read_kineto([write(tmp_path / "rank-3.t.json", two_steps(), distributedInfo=None)])
    assert only_rank(reading)["rank"] == 3
    assert any(
        "no distributedInfo" in sentence and "rank 3 by the file's name" in sentence for sentence in reading.warnings
    )


def test_a_distributed_info_that_is_written_as_python_is_read(tmp_path: Path) -> None:
    info = "{'backend': 'nccl', 'rank': 5, 'world_size': 8, 'pg_config': [{'ranks': [0, 1]}]}"
    rank = only_rank(read_kineto([write(tmp_path / "t.json", two_steps(), distributedInfo=info)]))
    assert (rank["rank"], rank["world_size"]) == (5, 8)


def test_a_distributed_info_that_is_code_is_not_run(tmp_path: Path) -> None:
    code = "{'rank': __import__('os').mkdir('" + str(tmp_path / "made") + "')}"
    reading = read_kineto([write(tmp_path / "t.json", two_steps(), distributedInfo=code)])
    assert only_rank(reading)["rank"] is None and not (tmp_path / "made").exists()


def test_a_trace_without_device_work_has_host_facts_and_no_costs(tmp_path: Path) -> None:
    host = [event for event in two_steps() if event["cat"] != "kernel"]
    reading = read_kineto([write(tmp_path / "t.json", host)])
    rank = only_rank(reading)
    assert rank["step_s"] == [0.02, 0.02] and rank["devices"] == rank["classes"] == rank["operators"] == []
    assert any("no device work although the job ran on GPUs" in sentence for sentence in reading.ignored)


def test_a_run_on_the_cpu_has_its_operators_and_messages(tmp_path: Path) -> None:
    events = [
        mark("ProfilerStep#1", 0, 1_000),
        operator("aten::linear", 100, 500),
        operator("aten::addmm", 150, 400),
        mark("gloo:all_reduce", 700, 200, **{"Input Dims": [[1_000]], "Input type": ["float"]}),
    ]
    info = {"backend": "gloo", "rank": 0, "world_size": 2}
    rank = only_rank(read_kineto([write(tmp_path / "t.json", events, distributedInfo=info, deviceProperties=[])]))
    assert [(row["name"], row["seconds"]) for row in rank["operators"]] == [
        ("aten::addmm", pytest.approx(4e-4)),
        ("aten::linear", pytest.approx(1e-4)),
    ]
    assert [(row["collective"], row["bytes"], row["seconds"]) for row in rank["messages"]] == [
        ("all_reduce", 4_000, 2e-4)
    ]


def test_events_that_stand_twice_count_once(tmp_path: Path) -> None:
    reading = read_kineto([write(tmp_path / "t.json", two_steps() * 2)])
    assert by_name(only_rank(reading)["classes"])["gemm"]["count"] == 4
    assert any("stand twice" in sentence for sentence in reading.warnings)


def test_a_cut_file_gives_its_whole_events_and_says_so(tmp_path: Path) -> None:
    whole = write(tmp_path / "t.json", two_steps()).read_text()
    cut = tmp_path / "cut.json"
    cut.write_text(whole[: whole.rindex("cudaDeviceSynchronize")])
    reading = read_kineto([cut])
    assert by_name(only_rank(reading)["classes"])["gemm"]["count"] == 4
    assert any("before the JSON does: 21 whole events" in sentence for sentence in reading.warnings)


def test_events_with_impossible_times_are_left_out_and_counted(tmp_path: Path) -> None:
    bad = [kernel(GEMM, 0, -5), kernel(GEMM, 1e18, 5), kernel(GEMM, 0, float("nan")), kernel(GEMM, 0, 10)]
    bad += [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 0}, kernel(GEMM, 9e9, 5)]
    reading = read_kineto([write(tmp_path / "t.json", [*two_steps(), *bad])])
    told = " ".join([*reading.ignored, *reading.warnings])
    for words in (
        "a negative duration",
        "beyond any clock",
        "no numbers",
        "did not end",
        "a minute off the host's clock",
    ):
        assert words in told, words


def test_an_event_of_another_age_does_not_stretch_the_trace(tmp_path: Path) -> None:
    reading = read_kineto([write(tmp_path / "t.json", [*two_steps(), mark("old", 1e15, 5), kernel(GEMM, 1e15, 5)])])
    assert only_rank(reading)["window_s"] == 0.04
    assert any("2 events are more than a day off the others" in sentence for sentence in reading.warnings)


@pytest.mark.parametrize("key", ["device", "stream"])
def test_a_file_with_countless_devices_or_streams_is_refused(tmp_path: Path, key: str) -> None:
    events = [kernel(GEMM, i, 1, **{key: i}) for i in range(10_001)]
    with pytest.raises(InputError, match="one process has at most 64 and 10,000"):
        read_kineto([write(tmp_path / "t.json", events)])


def test_old_category_names_and_the_fields_of_rocm_are_read(tmp_path: Path) -> None:
    events = [
        span("Operator", "aten::mm", 0, 100, **{"External id": 4}),
        span("Runtime", "hipLaunchKernel", 10, 5, cid=1, correlation=9),
        span(
            "Kernel", "Cijk_Ailk_Bjlk_SB_MT64x16x16_MI16x16x1", 50, 100, pid=2, tid=0, correlation=9, device=2, stream=0
        ),
        span("Memcpy", "Memcpy HtoD (Host -> Device)", 200, 10, pid=2, tid=0, device=2, stream=0, bytes=64),
    ]
    rank = only_rank(read_kineto([write(tmp_path / "t.json", events)]))
    assert [row["name"] for row in rank["operators"]] == ["aten::mm"]
    assert {row["name"] for row in rank["classes"]} == {"gemm", "memcpy"}
    assert rank["copies"][0]["bytes"] == 64


def test_the_export_of_the_old_autograd_profiler_is_read(tmp_path: Path) -> None:
    events = [
        {"name": "aten::mm", "ph": "X", "ts": 0, "dur": 50, "tid": 1, "pid": "CPU functions", "args": {}},
        {"name": GEMM, "ph": "X", "ts": 20, "dur": 100, "tid": "stream 7", "pid": "CUDA functions", "args": {}},
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(events))
    assert by_name(only_rank(read_kineto([path]))["classes"])["gemm"]["seconds"] == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"traceEvents": [{"ph": "X", "cat": "toplevel", "name": "a", "ts": 1, "dur": 2}]}, "a trace of a browser"),
        ({"traceEvents": [{"ph": "M", "name": "process_name", "args": {"name": "/device:GPU:0"}}]}, "JAX or XLA"),
        ({"traceEvents": [{"ph": "X", "cat": "F", "name": "0F1", "ts": 1, "dur": 2}]}, "`mmplan simulate` wrote"),
        ([{"ph": "b", "cat": "COLL", "name": "AllReduce", "ts": 1, "id": 0}], "NCCL's profiler plug-in"),
        ({"nodes": [], "schema": "1.0"}, "import it as chakra"),
        ({"traceEvents": []}, "no event of the PyTorch profiler"),
        ({}, "no event of the PyTorch profiler"),
    ],
)
def test_traces_of_other_tools_are_refused_by_name(tmp_path: Path, content: object, sentence: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=sentence):
        read_kineto([path])


def test_several_ranks_name_the_straggler_and_clocks_that_differ(tmp_path: Path) -> None:
    def rank(number: int, durations: list[int], shift: float) -> Path:
        ends = [1_000_000 + 20_000 * i + shift for i in range(len(durations))]
        events = [
            event
            for i, (end, dur) in enumerate(zip(ends, durations, strict=True))
            for event in launched(ALL_REDUCE, end - dur, dur, i, **collective(1_000))
        ]
        info = {"backend": "nccl", "rank": number, "world_size": 2}
        return write(tmp_path / f"r{number}.json.gz", events, distributedInfo=info)

    reading = read_kineto([rank(1, [9_000, 8_000], 50_000), rank(0, [1_000, 1_000], 0)])
    document: Any = reading.fragment
    assert [(w["rank"], w["wait_s"], w["clock_offset_s"]) for w in document["waits"]] == [(0, 0, 0), (1, 0.015, 0.05)]
    told = " ".join(reading.warnings)
    assert (
        "rank 0 is the straggler: it waits 0 ns in collectives, rank 1 15 ms" in told
        or "rank 0 is the straggler" in told
    )
    assert "clocks differ: that of rank 1 is 50 ms off" in told


def test_ranks_on_the_cpu_name_the_straggler_too(tmp_path: Path) -> None:
    paths = []
    for rank, dur in enumerate((5_000, 200)):
        sizes = {"Input Dims": [[100]], "Input type": ["float"]}
        events = [operator("aten::mm", 0, 50), mark("gloo:all_reduce", 10_000 - dur, dur, tid=9, **sizes)]
        info = {"backend": "gloo", "rank": rank, "world_size": 2}
        paths.append(write(tmp_path / f"{rank}.json", events, distributedInfo=info, deviceProperties=[]))
    assert any("rank 1 is the straggler" in sentence for sentence in read_kineto(paths).warnings)


def test_kernels_launched_by_several_processes_are_told(tmp_path: Path) -> None:
    events = launched(GEMM, 100, 50, 1) + launched(GEMM, 300, 50, 2)
    events[2]["pid"] = 2
    told = read_kineto([write(tmp_path / "t.json", events)]).warnings
    assert any("2 processes launch kernels in it" in sentence for sentence in told)


def test_files_that_cannot_be_one_job_are_said_to_be_so(tmp_path: Path) -> None:
    first = write(tmp_path / "a.json", two_steps())
    second = write(tmp_path / "b.json", two_steps(), distributedInfo={"backend": "nccl", "rank": 0, "world_size": 4})
    told = " ".join(read_kineto([first, second]).warnings)
    assert "2 files say that they are rank 0" in told and "jobs with 2, 4 ranks" in told


def test_a_filtered_file_warns_of_its_gaps(tmp_path: Path) -> None:
    kept = [event for event in two_steps() if event["cat"] != "kernel" or event["name"] == ALL_REDUCE]
    assert any("it was filtered or cut" in s for s in read_kineto([write(tmp_path / "t.json", kept)]).warnings)


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    reading = read_kineto([write(tmp_path / "t.json", two_steps())])
    (tmp_path / "t.yaml").write_text(fragment_text(reading))
    record = load_trace_record(tmp_path / "t.yaml")
    assert record.schema == SCHEMA and record.ranks[0].step_s == (0.02, 0.02)


def test_names_with_control_characters_and_half_surrogates_are_written_and_read(tmp_path: Path) -> None:
    odd = [
        mark("\x1b[31m\ud800 iteration", 1_000_000, 10),
        span("\x9f kernels", "k", 0, 1),
        kernel("gemm \ud8ff\x00", 1_000_010, 5),
    ]
    reading = read_kineto([write(tmp_path / "t.json", [*two_steps(), *odd])])
    (tmp_path / "t.yaml").write_text(fragment_text(reading), encoding="utf-8")
    assert "gemm ??" in {row.name for row in load_trace_record(tmp_path / "t.yaml").ranks[0].kernels}


def test_the_record_of_many_ranks_is_shorter_and_still_reads(tmp_path: Path) -> None:
    paths = []
    for rank in range(12):
        marks = [mark(f"range {i}", 1_000_100 + i, 10) for i in range(30)]
        info = {"backend": "nccl", "rank": rank, "world_size": 12}
        paths.append(write(tmp_path / f"{rank}.json", [*two_steps(), *marks], distributedInfo=info))
    reading = read_kineto(paths)
    (tmp_path / "t.yaml").write_text(fragment_text(reading))
    record = load_trace_record(tmp_path / "t.yaml")
    assert [rank.rank for rank in record.ranks] == list(range(12))
    assert {len(rank.host_ranges) for rank in record.ranks} == {10}


def test_a_damaged_record_is_refused_by_its_key(tmp_path: Path) -> None:
    text = fragment_text(read_kineto([write(tmp_path / "t.json", two_steps())]))
    (tmp_path / "t.yaml").write_text(text.replace("window_s: 0.04", "window_s: soon"))
    with pytest.raises(InputError, match=r"window_s: input should be a valid number"):
        load_trace_record(tmp_path / "t.yaml")


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), st.text(max_size=8), st.just([]), st.just({})
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_values_in_events_give_a_reading_or_a_refusal(tmp_path: Path, data: st.DataObject) -> None:
    events = two_steps()
    for _ in range(data.draw(st.integers(1, 6))):
        event = data.draw(st.sampled_from(events))
        key = data.draw(st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "dur", "args"]))
        if key == "args" and isinstance(event["args"], dict) and data.draw(st.booleans()) and event["args"]:
            event["args"][data.draw(st.sampled_from(sorted(event["args"])))] = data.draw(_VALUES)
        else:
            event[key] = data.draw(_VALUES)
    try:
        rank = only_rank(read_kineto([write(tmp_path / "t.json", events)]))
    except InputError:
        return
    for device in rank["devices"]:
        assert all(0 <= value <= rank["window_s"] * 1.000001 for key, value in device.items() if key.endswith("_s"))
