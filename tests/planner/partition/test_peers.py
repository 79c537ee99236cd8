"""Inputs of published planners: their optima are reached, and files that are wrong are refused with file and key."""

import csv
import importlib
import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from mmplan.errors import InputError
from mmplan.planner.partition.cpsat import place_by_cpsat
from mmplan.planner.partition.groups import floor_ps, group_nodes
from mmplan.planner.partition.replicated import solve_replicated
from mmplan.planner.partition.solve import solve_partition
from mmplan.planner.stopping import Deadline

ROOT = Path(__file__).parents[3]
PEERS = ROOT.parent / "shared" / "data" / "peers"


def enough() -> Deadline:
    """A minute from now."""
    return Deadline(limit_s=60)


with (ROOT / "benchmarks" / "peers_published.csv").open(newline="") as rows:
    PUBLISHED = list(csv.DictReader(rows))
needs_data = pytest.mark.skipif(not PEERS.exists(), reason="the peers' inputs are not here")

DAG = {
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "maxSizePerFPGA": 10,
    "nodes": [
        {"id": 7, "cpuLatency": 30, "fpgaLatency": 3, "size": 1, "supportedOnFpga": 1, "isBackwardNode": 0},
        {"id": 9, "cpuLatency": 20, "fpgaLatency": 2, "size": 1, "supportedOnFpga": False, "isBackwardNode": False},
    ],
    "edges": [{"sourceId": 7, "destId": 9, "cost": 0.5}],
}
CONFIGURATION = {
    "id": "vanilla",
    "timePerSample": 6.0,
    "parameterSize": 0,
    "memoryUsageA": 1,
    "memoryUsageB": 6,
    "syncTimeFw": {},
    "syncTimeBw": {},
}
TABLE = {
    "maxDevices": 2,
    "maxMemoryPerDevice": 10,
    "bandwidth": 4,
    "mbsInBatch": 8,
    "nodes": [
        {"id": 1, "TMPCs": {"1": [{**CONFIGURATION, "syncTimeFw": {"5": 3}}]}},
        {"id": 5, "TMPCs": {"1": [{**CONFIGURATION, "syncTimeBw": {"1": 1}}]}},
    ],
    "edges": [{"sourceId": 5, "destId": 1, "communicationCost": 2}],
}


@pytest.fixture
def peer_files(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("peer_files")


def written(folder: Path, content: object) -> Path:
    file = folder / "peer.json"
    file.write_text(json.dumps(content))
    return file


@needs_data
@pytest.mark.parametrize("row", [row for row in PUBLISHED if row["cpus"] != "0"], ids=lambda row: row["file"])
def test_the_published_optimum_of_a_dag_is_reached_and_proved(row: dict[str, str], peer_files: ModuleType) -> None:
    problem = peer_files.read_placement(peer_files.open_peer_file(PEERS / "dnn-partitioning" / row["file"]))
    assert (problem.accelerators, problem.cpus) == (int(row["devices"]), int(row["cpus"]))
    result = solve_partition(problem, enough())
    assert result.optimal
    assert result.objective_s * 1000 == pytest.approx(float(row["published"]), rel=5e-6)


@needs_data
def test_cpsat_proves_the_optimum_that_its_presolve_would_lose(peer_files: ModuleType) -> None:
    """With presolve, OR-Tools 9.15 calls this feasible model infeasible."""
    name = "throughput-inputs/OperatorGraphs/resnet50_training.json"
    problem = peer_files.read_placement(peer_files.open_peer_file(PEERS / "dnn-partitioning" / name))
    value_ps = floor_ps(solve_partition(problem, enough()).bound_s)
    answer = place_by_cpsat(group_nodes(problem), 0, value_ps + 10**7, enough())
    assert answer.bound_ps == pytest.approx(value_ps, abs=1)


@needs_data
@pytest.mark.parametrize(
    "row",
    [row for row in PUBLISHED if row["cpus"] == "0" and int(row["devices"]) < 128],
    ids=lambda row: row["devices"],
)
def test_the_published_value_of_a_layer_table_is_reached_and_proved(
    row: dict[str, str], peer_files: ModuleType
) -> None:
    reader = peer_files.open_peer_file(PEERS / row["file"])
    problem = peer_files.read_layer_table(reader, 25 * 1024**3)
    case = replace(problem, devices=int(row["devices"]), capacity_bytes=float(row["memory_bytes"]))
    result = solve_replicated(case, enough())
    assert result.optimal
    assert result.objective_s == pytest.approx(float(row["published"]), rel=3e-6)


def test_a_dag_is_read_in_milliseconds_with_the_devices_it_states(tmp_path: Path, peer_files: ModuleType) -> None:
    """Node 9 must run on the CPU in 20 ms; node 7 takes 3 ms and sends for 0.5 ms."""
    problem = peer_files.read_placement(peer_files.open_peer_file(written(tmp_path, DAG)))
    assert solve_partition(problem, enough()).objective_s == pytest.approx(0.020)
    assert problem.consumers == ((1,), ())
    assert problem.transfer_s[0] == pytest.approx(0.0005)


def test_a_layer_table_moves_tensor_and_synchronisation_both_ways(tmp_path: Path, peer_files: ModuleType) -> None:
    """Two layers of 6 s and 6 + y bytes on devices of 10 must part. The edge 5 -> 1 moves 2 bytes, and 3 at node 1, 1
    at node 5 for synchronisation, forwards and backwards at 4 bytes/s: 6 + 2 * 5 / 4 = 8.5 s at node 1.
    """
    problem = peer_files.read_layer_table(peer_files.open_peer_file(written(tmp_path, TABLE)))
    assert solve_replicated(problem, enough()).objective_s == pytest.approx(8.5)


def _changed(content: dict[str, object], path: list[str | int], value: object) -> dict[str, object]:
    """A copy with the value at the path replaced, or removed when it is None."""
    copy = deepcopy(content)
    inner = copy
    for key in path[:-1]:
        inner = inner[key]  # type: ignore[index,assignment]
    if value is None:
        del inner[path[-1]]  # type: ignore[arg-type]
    else:
        inner[path[-1]] = value  # type: ignore[index]
    return copy


@pytest.mark.parametrize(
    ("content", "path", "value", "key"),
    [
        *[(DAG, [name], None, name) for name in ("maxFPGAs", "maxCPUs", "maxSizePerFPGA", "nodes", "edges")],
        *[(DAG, ["nodes", 0, name], None, f"nodes[0].{name}") for name in ("id", "cpuLatency", "fpgaLatency", "size")],
        *[(DAG, ["edges", 0, name], None, f"edges[0].{name}") for name in ("sourceId", "destId", "cost")],
        *[(TABLE, [name], None, name) for name in ("maxDevices", "maxMemoryPerDevice", "bandwidth", "mbsInBatch")],
        *[(TABLE, ["nodes", 0, name], None, f"nodes[0].{name}") for name in ("id", "TMPCs")],
        *[(TABLE, ["nodes", 0, "TMPCs", "1", 0, n], None, f"nodes[0].TMPCs.1[0].{n}") for n in CONFIGURATION],
        (DAG, ["nodes", 0, "cpuLatency"], "30", "nodes[0].cpuLatency"),
        (DAG, ["nodes", 0, "cpuLatency"], float("nan"), "nodes[0].cpuLatency"),
        (DAG, ["nodes", 0, "size"], -1, "nodes[0].size"),
        (DAG, ["nodes", 0, "colorClass"], "red", "nodes[0].colorClass"),
        (DAG, ["nodes", 1, "id"], 7, "nodes[1].id"),
        (DAG, ["nodes"], [], "nodes"),
        (DAG, ["edges", 0, "destId"], 8, "edges[0].destId"),
        (DAG, ["maxFPGAs"], 1.5, "maxFPGAs"),
        (TABLE, ["edges", 0, "destId"], 5, "edges"),
        (TABLE, ["bandwidth"], 0, "bandwidth"),
        (TABLE, ["nodes", 0, "TMPCs"], {}, "nodes[0].TMPCs"),
        (TABLE, ["nodes", 0, "TMPCs"], {"x": []}, "nodes[0].TMPCs.x"),
        (TABLE, ["nodes", 0, "TMPCs", "1"], [], "nodes[0].TMPCs.1"),
        (TABLE, ["nodes", 0, "TMPCs", "1", 0, "syncTimeFw"], {"8": 1}, "nodes[0].TMPCs.1[0].syncTimeFw.8"),
    ],
)
def test_a_wrong_file_is_refused_with_file_and_key(
    content: dict[str, object],
    path: list[str | int],
    value: object,
    key: str,
    tmp_path: Path,
    peer_files: ModuleType,
) -> None:
    file = written(tmp_path, _changed(content, path, value))
    with pytest.raises(InputError) as caught:
        reader = peer_files.open_peer_file(file)
        is_table = peer_files.is_layer_table(reader)
        (peer_files.read_layer_table if is_table else peer_files.read_placement)(reader)
    assert (caught.value.file, caught.value.key) == (file, key)


def test_outputs_of_one_node_at_unlike_costs_are_refused(tmp_path: Path, peer_files: ModuleType) -> None:
    edges = [{"sourceId": 7, "destId": 9, "cost": 0.5}, {"sourceId": 7, "destId": 9, "cost": 0.6}]
    with pytest.raises(InputError, match="another edge of node 7 has another cost"):
        peer_files.read_placement(peer_files.open_peer_file(written(tmp_path, {**DAG, "edges": edges})))


def test_the_command_prints_a_line_per_problem_and_fails_on_a_wrong_file(tmp_path: Path) -> None:
    good, table, bad = tmp_path / "dag.json", tmp_path / "table.json", tmp_path / "bad.json"
    good.write_text(json.dumps(DAG))
    table.write_text(json.dumps(TABLE))
    bad.write_text(json.dumps(_changed(DAG, ["maxCPUs"], None)))
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), str(bad), str(good), str(table)]
    memory = ["--devices", "1,2", "--memory-gib", "1"]
    run = subprocess.run([*command, *memory], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [(Path(line["file"]).name, line["devices"]) for line in lines] == [
        ("dag.json", 1),
        ("dag.json", 2),
        ("table.json", 1),
        ("table.json", 2),
    ]
    assert {line["status"] for line in lines} == {"optimal"}
    assert lines[0]["objective"] == pytest.approx(20)
    assert run.returncode == 2
    assert run.stderr == f"{bad}: maxCPUs: key is missing\n"


def test_folders_are_read_whole_and_other_files_told_apart(tmp_path: Path) -> None:
    """Node 7 on an accelerator sends for 0.5 ms to node 9, which takes the CPU 20 ms: 3 + 0.5 + 20."""
    inputs = tmp_path / "latency-inputs"
    inputs.mkdir()
    bare = _changed(_changed(DAG, ["nodes", 0, "isBackwardNode"], None), ["nodes", 0, "supportedOnFpga"], None)
    (inputs / "dag.json").write_text(json.dumps(bare))
    (inputs / "an_expert.json").write_text(json.dumps({"fpgas": [{"nodes": [7, 9]}], "cpus": [], "maxLoad": -1}))
    (inputs / "other.json").write_text(json.dumps({"a": 1}))
    (inputs / "notes.txt").write_text("no JSON")
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    (line,) = map(json.loads, run.stdout.splitlines())
    assert (line["kind"], line["status"]) == ("latency", "optimal")
    assert line["objective"] == pytest.approx(23.5)
    first, second = run.stderr.splitlines()
    assert first.startswith(f"{inputs / 'an_expert.json'}: a placement on 1 accelerators, not a workload: ")
    assert second.endswith("neither an operator DAG nor a layer table, which have nodes and edges; its keys: a")
    assert run.returncode == 2
