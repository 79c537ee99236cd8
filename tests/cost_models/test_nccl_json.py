"""The JSON that nccl-tests write gives what their table gives."""

import json
from pathlib import Path
from typing import Any

import pytest
from nccl_texts import device_lines, log_text

from mmplan.commands.import_kinds import read_files
from mmplan.errors import InputError

SIZES = tuple(8 * 2**k for k in range(30))
A100 = "NVIDIA A100-SXM4-80GB"


def time_s(size: int) -> float:
    return 2e-5 + size / 1.3e11


def values() -> dict[str, Any]:
    def result(size: int) -> dict[str, Any]:
        us, algbw = time_s(size) * 1e6, size / time_s(size) / 1e9
        block = {"time": us, "alg_bw": algbw, "bus_bw": algbw * 1.75, "nwrong": 0}
        blocks = {"out_of_place": block, "in_place": block}
        return {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": -1, **blocks}

    devices = [
        {"group": 0, "pid": 900, "hostname": "n1", "rank": rank, "device": rank, "name": A100} for rank in range(8)
    ]
    return {"version": 1, "args": ["./build/all_reduce_perf", "-g", "8"], "devices": devices} | {
        "results": [result(size) for size in SIZES]
    }


@pytest.mark.parametrize("indent", [None, 2])
def test_the_json_gives_the_links_of_the_table(tmp_path: Path, indent: int | None) -> None:
    (tmp_path / "out.json").write_text(json.dumps(values(), indent=indent))
    table = log_text("all_reduce", 8, time_s, sizes=SIZES, devices=device_lines(["n1"], 8, A100), named=True)
    (tmp_path / "out.log").write_text(table)
    of_json, of_table = (read_files([str(tmp_path / name)]) for name in ("out.json", "out.log"))
    links = [dict(reading.fragment["cluster"])["node_link"] for reading in (of_json, of_table)]  # type: ignore[call-overload]
    assert links[0]["fraction"] == pytest.approx(links[1]["fraction"], rel=0.01)
    assert of_json.kind == "nccl" and "8 ranks" in of_json.read[0] and "1 node (by the list" in of_json.read[0]


def test_damaged_json_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    text = json.dumps(values(), indent=2)
    lied = values()
    for one in lied["results"]:
        one["out_of_place"]["alg_bw"] = 77.0
    lone = values() | {"results": [values()["results"][0] | {"out_of_place": None, "in_place": None}]}
    for written, words in (
        (text[:-900], "expected whole JSON of nccl-tests: "),
        (json.dumps(values() | {"results": []}) + '\n"bus_bw"', "expected whole JSON"),
        (json.dumps(values() | {"results": [], "bus_bw": 1}), "expected a list of 1 to"),
        (json.dumps(lone | {"bus_bw": 1}), "no time, algbw and busbw"),
        (json.dumps(lied, indent=2), "algbw 77.000000 GB/s is not"),
    ):
        file.write_text(written)
        with pytest.raises(InputError, match=words):
            read_files(["nccl", str(file)])


def test_times_of_the_cpu_are_refused(tmp_path: Path) -> None:
    text = log_text("all_reduce", 8, time_s, sizes=SIZES).replace("time   algbw", "cputime algbw")
    rows = [line.split() for line in text.splitlines()]
    slower = [
        " ".join(["9.87" if at in (5, 9) else word for at, word in enumerate(row)]) if len(row) == 13 else " ".join(row)
        for row in rows
    ]
    (tmp_path / "cpu.log").write_text("\n".join(slower) + "\n")
    with pytest.raises(InputError, match=r"cpu.log:\d+: the times are the CPU's \(-C 1\)"):
        read_files([str(tmp_path / "cpu.log")])
