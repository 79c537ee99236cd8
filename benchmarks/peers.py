"""Published planners' inputs under their own objectives, solved to a proven optimum; a JSON line per problem on stdout.

    python benchmarks/peers.py FILE_OR_FOLDER... [--no-verify] [--csv benchmarks/peers.csv] [--objective latency]
    python benchmarks/peers.py TABLE --devices 8,32 --memory-gib 8,2 --link-gib-per-s 25

Operator DAGs (dnn-partitioning): load of the busiest device in ms, contiguous stages, with the devices that the file
states; of files in a folder of `latency-inputs`, or with `--objective latency`, the time until the last node ends, in
ms, where each accelerator works once. Layer tables (Piper): seconds per sample of the slowest stage, with the devices
that the file states and those of the published results. `bound` is proven: no placement is below it; `status` is
`optimal` when it meets `objective`.

Which engine proves what (`method`): throughput DAGs the dynamic program over downsets (`dp`), or CP-SAT where these are
too many (`cpsat`); of those of `dp` CP-SAT proves once more, for at most 30 s, that nothing is below the objective
(`cpsat_bound`, `cpsat_wall_s`, which `wall_s` leaves out; `--no-verify`: not). Latency DAGs labels over downsets, layer
tables a dynamic program over replicated stages; CP-SAT has no part in these. `published`: peers_published.csv. What is
no workload is told, and the other files are solved.
"""

import os

# One thread: matrices here are small, and threads that wait for a busy core are many times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from measured import MACHINE
from peer_files import (
    MS_PER_S,
    Reader,
    is_layer_table,
    open_peer_file,
    read_layer_table,
    read_placement,
    refuse_other_kinds,
)

from mmplan.errors import InfeasibleError, InputError, NoPlanFoundError
from mmplan.planner.partition.cpsat import place_by_cpsat
from mmplan.planner.partition.groups import PS_PER_S, floor_ps, group_nodes
from mmplan.planner.partition.latency import solve_latency
from mmplan.planner.partition.problem import PartitionProblem
from mmplan.planner.partition.replicated import solve_replicated
from mmplan.planner.partition.replicated_problem import ReplicatedProblem
from mmplan.planner.partition.solve import solve_partition
from mmplan.planner.stopping import Deadline

HERE = Path(__file__).parent
GIB = 1024**3
# Piper's published cases: GiB per device, numbers of devices; over links of 25 GiB/s.
PIPER_CASES = {8: (8, 32, 64, 128, 512, 1024), 2: (32, 64, 128, 512, 1024), 80: (8, 512, 1024)}
PIPER_LINK_GIB_PER_S = 25.0
VERIFY_S = 30.0
Line = dict[str, object]


def solve_dag(problem: PartitionProblem, limit_s: float, verify: bool) -> Line:
    """What is known of one operator DAG, in milliseconds."""
    result = solve_partition(problem, Deadline(limit_s=limit_s))
    line: Line = {
        "objective": result.objective_s * MS_PER_S,
        "bound": result.bound_s * MS_PER_S,
        "status": "optimal" if result.optimal else "feasible",
        "method": result.method,
        "groups": result.groups,
        "downsets": result.downsets,
        "ended": clocks(),
    }
    if verify and result.method == "dp":
        started = time.perf_counter()
        limit_s = min(limit_s, VERIFY_S)
        answer = place_by_cpsat(group_nodes(problem), 0, floor_ps(result.bound_s) - 1, Deadline(limit_s=limit_s))
        line["cpsat_bound"] = answer.bound_ps / PS_PER_S * MS_PER_S
        line["cpsat_wall_s"] = round(time.perf_counter() - started, 3)
    return line


def solve_slowest_path(problem: PartitionProblem, limit_s: float) -> Line:
    """What is known of the latency of one operator DAG, in milliseconds."""
    result = solve_latency(problem, Deadline(limit_s=limit_s))
    return {
        "objective": result.objective_s * MS_PER_S,
        "bound": result.bound_s * MS_PER_S,
        "status": "optimal" if result.optimal and result.cores <= problem.cpus else "feasible",
        "method": "labels",
        "groups": result.groups,
        "downsets": result.downsets,
        "cpu_cores": result.cores,
    }


def solve_table(problem: ReplicatedProblem, limit_s: float) -> Line:
    """What is known of one layer table on some devices, in seconds per sample."""
    result = solve_replicated(problem, Deadline(limit_s=limit_s))
    return {
        "objective": result.objective_s,
        "bound": result.bound_s,
        "status": "optimal" if result.optimal else "feasible",
        "method": "dp",
        "downsets": result.downsets,
        "stages": len(result.stages),
    }


def dag_lines(reader: Reader, options: argparse.Namespace) -> Iterator[Line]:
    problem = read_placement(reader)
    inputs = any("latency" in part.lower() for part in reader.file.parts[-3:])
    latency = options.objective == "latency" or (options.objective is None and inputs)
    for devices in options.devices or [problem.accelerators]:
        for memory_bytes in options.memory_bytes or [problem.capacity_bytes]:
            started = clocks()
            case = replace(read_placement(reader), accelerators=devices, capacity_bytes=memory_bytes)
            about: Line = {
                "kind": "latency" if latency else "contiguous",
                "unit": "ms",
                "devices": devices,
                "cpus": case.cpus,
            }
            about["memory_bytes"] = memory_bytes
            if latency:
                yield about | answer(lambda case=case: solve_slowest_path(case, options.limit_s), started)
            else:
                yield about | answer(lambda case=case: solve_dag(case, options.limit_s, options.verify), started)


def table_lines(reader: Reader, options: argparse.Namespace) -> Iterator[Line]:
    link = options.link_gib_per_s
    stated = read_layer_table(reader, link and link * GIB)
    cases = [
        (devices, memory_bytes, stated.link_bytes_per_s)
        for devices in options.devices or [stated.devices]
        for memory_bytes in options.memory_bytes or [stated.capacity_bytes]
    ]
    if not (options.devices or options.memory_bytes or link):
        cases += [(k, gib * GIB, PIPER_LINK_GIB_PER_S * GIB) for gib, counts in PIPER_CASES.items() for k in counts]
    for devices, memory_bytes, link_bytes_per_s in cases:
        started = clocks()
        table = read_layer_table(reader, link_bytes_per_s)
        case = replace(table, devices=devices, capacity_bytes=memory_bytes)
        about: Line = {"kind": "replicated stages", "unit": "s per sample", "devices": devices, "cpus": 0}
        about |= {"memory_bytes": memory_bytes, "link_bytes_per_s": link_bytes_per_s}
        yield about | answer(lambda case=case: solve_table(case, options.limit_s), started)


def clocks() -> tuple[float, float]:
    """Wall and CPU seconds so far."""
    return time.perf_counter(), time.process_time()


def answer(solve: Callable[[], Line], started: tuple[float, float]) -> Line:
    """The solver's line with its wall and CPU seconds from reading the problem on; without CP-SAT's behind it."""
    try:
        line = solve()
    except (InfeasibleError, NoPlanFoundError) as error:
        status = "infeasible" if isinstance(error, InfeasibleError) else "unknown"
        line = {"objective": None, "bound": None, "status": status, "message": str(error)}
    ended = line.pop("ended", None) or clocks()
    spent_s = [round(end - start, 3) for end, start in zip(ended, started, strict=True)]
    return {**line, "wall_s": spent_s[0], "cpu_s": spent_s[1]}


def published(file: Path, line: Line) -> dict[str, str]:
    """The published row of the same file, devices, memory and link, empty when there is none."""
    with (HERE / "peers_published.csv").open(newline="") as rows:
        for row in csv.DictReader(rows):
            same = all(float(row[name]) == line[name] for name in ("devices", "cpus", "memory_bytes"))
            link = line.get("link_bytes_per_s", PIPER_LINK_GIB_PER_S * GIB)
            if same and file.as_posix().lower().endswith(row["file"].lower()) and link == PIPER_LINK_GIB_PER_S * GIB:
                return {name: row[name] for name in ("published", "published_wall_s", "source")}
    return {"published": "", "published_wall_s": "", "source": ""}


def write_csv(path: Path, lines: list[tuple[Path, Line]]) -> None:
    names = ["devices", "cpus", "memory_bytes", "link_bytes_per_s", "unit", "objective", "bound", "status", "wall_s"]
    names += ["cpu_s", "method", "groups", "downsets", "cpsat_bound", "cpsat_wall_s"]
    with path.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["file", *names, "published", "published_wall_s", "source", "machine"])
        for file, line in lines:
            values = [line.get(name) for name in names]
            shown = [f"{value:.9g}" if isinstance(value, float) else value for value in values]
            writer.writerow(["/".join(file.parts[-3:]), *shown, *published(file, line).values(), MACHINE])


def listed_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Files as they are named, and of folders all that end in .json."""
    for path in paths:
        yield from sorted(path.rglob("*.json")) if path.is_dir() else [path]


def numbers(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if min(values) <= 0:
        raise ValueError
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE_OR_FOLDER")
    parser.add_argument("--objective", choices=("throughput", "latency"), help="default: what the folder's name says")
    parser.add_argument("--devices", type=lambda text: [int(value) for value in numbers(text)])
    parser.add_argument("--memory-gib", type=numbers, dest="memory_gib")
    parser.add_argument("--link-gib-per-s", type=float)
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    options.memory_bytes = options.memory_gib and [gib * GIB for gib in options.memory_gib]
    lines: list[tuple[Path, Line]] = []
    wrong = False
    for file in listed_files(options.files):
        try:
            reader = open_peer_file(file)
            refuse_other_kinds(reader)
            for line in (table_lines if is_layer_table(reader) else dag_lines)(reader, options):
                print(json.dumps({"file": str(file), **line}), flush=True)
                lines.append((file, line))
        except InputError as error:
            print(error, file=sys.stderr)
            wrong = True
    if options.csv:
        write_csv(options.csv, lines)
    return InputError.exit_code if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
