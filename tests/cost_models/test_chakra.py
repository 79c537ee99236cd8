"""Execution traces of Chakra and PyTorch, and traces of NCCL's profiler plug-in: what they hold and what they cannot
say."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmplan.commands.import_kinds import read_files
from mmplan.cost_models.formats.chakra import read_chakra
from mmplan.cost_models.formats.nccl_profiler import read_nccl_profiler
from mmplan.errors import InputError

GEMM = "ampere_bf16_s16816gemm_bf16_128x64_tn"


def only_rank(reading: Any) -> dict[str, Any]:
    (rank,) = reading.fragment["ranks"]
    return dict(rank)


def graph(path: Path) -> Path:
    nodes = [
        {"Id": 1, "Name": "aten::mm", "NodeType": 4, "runtime": 30, "is_cpu_op": True},
        {"Id": 2, "Name": GEMM, "NodeType": 4, "runtime": 500, "is_cpu_op": False},
        {"Id": 3, "Name": GEMM, "NodeType": 4, "runtime": 700, "is_cpu_op": False},
        {"Id": 4, "Name": "c10d::allreduce_", "NodeType": 7, "runtime": 80, "is_cpu_op": True},
        {
            "Id": 5,
            "Name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL()",
            "NodeType": 7,
            "runtime": 900,
            "is_cpu_op": False,
        },
    ]
    path.write_text(json.dumps({"workload_graph": nodes, "workload_name": "w", "ngpus": 8}, indent=1))
    return path


def test_times_of_nodes_are_added_by_class(tmp_path: Path) -> None:
    reading = read_files([str(graph(tmp_path / "small.3.json"))])
    rank = only_rank(reading)
    assert (reading.kind, rank["rank"], rank["devices"]) == ("chakra", 3, [])
    assert {row["name"]: (row["seconds"], row["count"]) for row in rank["classes"]} == {
        "gemm": (1.2e-3, 2),
        "communication": (9e-4, 1),
    }
    assert {row["name"]: row["seconds"] for row in rank["operators"]} == {"aten::mm": 3e-5, "c10d::allreduce_": 8e-5}
    assert [(row["collective"], row["seconds"]) for row in rank["messages"]] == [("all_reduce", 9e-4)]
    assert any("no begin" in sentence for sentence in reading.ignored)


def test_chakra_with_one_node_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rank_2.json"
    nodes = [
        {"version": "0.0.4"},
        {
            "id": "1",
            "name": "comm_coll_node_7",
            "type": "COMM_COLL_NODE",
            "durationMicros": "250",
            "attr": [
                {"name": "is_cpu_op", "boolVal": False},
                {"name": "comm_size", "int64Val": "4096"},
                {"name": "comm_type", "int64Val": "2"},
            ],
        },
    ]
    path.write_text("\n".join(map(json.dumps, nodes)))
    rank = only_rank(read_files(["chakra", str(path)]))
    assert rank["rank"] == 2
    assert [(row["collective"], row["bytes"], row["seconds"]) for row in rank["messages"]] == [
        ("all_gather", 4096, 2.5e-4)
    ]


def an_observer(path: Path, inputs: dict[str, Any]) -> Path:
    node = {"name": "aten::addmm", "id": 5, "rf_id": 3, "fw_parent": 0, "op_schema": "aten::addmm(...)", **inputs}
    process = {"name": "[pytorch|profiler|execution_trace|process]", "id": 1, "rf_id": 0, "fw_parent": 0}
    attributes = {"collective_name": "allreduce", "dtype": "BFloat16", "in_msg_nelems": 100, "out_msg_nelems": 100}
    listed = [{"name": key, "type": "string", "value": value} for key, value in attributes.items()]
    message = {"name": "record_param_comms", "id": 9, "attrs": listed}
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": [process, node, node, message]}))
    return path


SHAPES = [[64], [32, 128], [128, 64], [], []]
TYPES = ["Tensor(c10::BFloat16)"] * 3 + ["Int", "Int"]


@pytest.mark.parametrize(
    "inputs",
    [
        {"inputs": [1, 2, 3, 1, 1], "input_shapes": SHAPES, "input_types": TYPES},
        {"inputs": {"values": [1, 2, 3, 1, 1], "shapes": SHAPES, "types": TYPES}},
    ],
)
def test_an_observer_gives_sizes_and_no_times(tmp_path: Path, inputs: dict[str, Any]) -> None:
    reading = read_files([str(an_observer(tmp_path / "et.json", inputs))])
    rank = only_rank(reading)
    assert rank["products"] == [{"rows": 32, "inner": 128, "outer": 64, "dtype": "bf16", "count": 2}]
    assert {row["seconds"] for row in rank["operators"]} == {None}
    assert [(row["collective"], row["bytes"], row["seconds"]) for row in rank["messages"]] == [
        ("all_reduce", 200, None)
    ]
    assert any("holds no times" in sentence for sentence in reading.ignored)
    assert any("2 matrix products of 1.05 MFLOP" in sentence for sentence in reading.read)


def varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])


def counted(content: bytes) -> bytes:
    return varint(len(content)) + content


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def text(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + counted(content)


def a_protobuf(path: Path) -> Path:
    attributes = text(10, text(1, b"is_cpu_op") + number(27, 0)) + text(10, text(1, b"comm_size") + number(9, 4096))
    message = (
        number(1, 7) + text(2, b"ncclDevKernel_AllReduce_Sum") + number(3, 7) + text(4, b"\x01\x02") + number(7, 300)
    )
    product = number(1, 8) + text(2, GEMM.encode()) + number(3, 4) + number(7, 500)
    product += (
        text(10, text(1, b"is_cpu_op") + number(27, 0))
        + varint(50 << 3 | 1)
        + bytes(8)
        + varint(51 << 3 | 5)
        + bytes(4)
    )
    path.write_bytes(counted(text(1, b"0.0.4")) + counted(message + attributes) + counted(product))
    return path


def test_a_protobuf_is_read_without_its_library(tmp_path: Path) -> None:
    rank = only_rank(read_files([str(a_protobuf(tmp_path / "trace.5.et"))]))
    assert rank["rank"] == 5
    assert {row["name"]: row["seconds"] for row in rank["classes"]} == {"gemm": 5e-4, "communication": 3e-4}
    assert [(row["collective"], row["bytes"], row["seconds"]) for row in rank["messages"]] == [
        ("all_reduce", 4096, 3e-4)
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=4)), min_size=1, max_size=4), st.integers(1, 300))
def test_damaged_protobufs_give_a_reading_or_a_refusal(
    tmp_path: Path, edits: list[tuple[int, bytes]], end: int
) -> None:
    content = bytearray(a_protobuf(tmp_path / "t.et").read_bytes())
    for at, new in edits:
        content[at : at + len(new)] = new
    (tmp_path / "m.et").write_bytes(content[:end])
    try:
        read_chakra([tmp_path / "m.et"])
    except InputError:
        return


def test_a_cut_protobuf_gives_its_whole_nodes(tmp_path: Path) -> None:
    path = a_protobuf(tmp_path / "t.et")
    path.write_bytes(path.read_bytes()[:-5])
    reading = read_chakra([path])
    assert [row["name"] for row in only_rank(reading)["classes"]] == ["communication"]
    assert any("1 whole nodes are read" in sentence for sentence in reading.warnings)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "no nodes in it"),
        (b'{"nodes": []}', "no nodes in it"),
        (b'{"nodes": [3]}', "expected nodes that are objects"),
        (b'{"a": 1}\n{"b": \n', "expected one JSON object a line"),
        (b"\xff" * 40, "no Chakra protobuf"),
        (b"\x02\x0a\x00\x05\xff\xff\xff\xff\xff", "a damaged field"),
    ],
)
def test_what_is_no_execution_trace_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "t.et").write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        read_chakra([tmp_path / "t.et"])


def coll(name: str, count: int, **more: Any) -> dict[str, Any]:
    arguments = {"SeqNum": 0, "CommHash": 77, "Rank": 3, "Count": count, "Datatype": "ncclFloat32", **more}
    return {"name": name, "cat": "COLL", "ph": "b", "id": 0, "pid": 1, "tid": 1, "ts": 1.5, "args": arguments}


def test_the_plug_in_tells_sizes_and_no_times(tmp_path: Path) -> None:
    events = [
        coll("AllReduce", 256),
        {**coll("AllReduce", 256), "ph": "e"},
        coll("AllGather", 64),
        coll("AllGather", 64, nRanks=4),
    ]
    path = tmp_path / "nccl.json"
    path.write_text(json.dumps(events)[:-1] + ",\n")  # never closed
    reading = read_files([str(path)])
    rank = only_rank(reading)
    assert (reading.kind, rank["rank"]) == ("nccl-profiler", 3)
    assert {(row["collective"], row["bytes"], row["count"], row["seconds"]) for row in rank["messages"]} == {
        ("all_reduce", 1024, 1, None),
        ("all_gather", None, 1, None),
        ("all_gather", 1024, 1, None),
    }
    assert any("enqueued" in sentence for sentence in reading.ignored)
    assert any("the whole events are read" in sentence for sentence in reading.warnings)


def test_a_list_without_its_events_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('[{"cat": "other"}]')
    with pytest.raises(InputError, match="no COLL or P2P event"):
        read_nccl_profiler([tmp_path / "t.json"])
