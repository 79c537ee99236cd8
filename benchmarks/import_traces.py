"""Seconds and peak memory of `mmplan import kineto` for traces of 300 MB and 1 GB.

    python benchmarks/import_traces.py [--megabytes 300 1000] [--stacks]

The traces are made here in the form that torch 2.x writes (indented, operators, launches, arrows, kernels with all
their arguments, all-reduces with sizes; a step has 2,000 kernels), so that they have about as many events as real ones
of that size. With --stacks each operator lies in eight Python functions, as with_stack=True records them. Adds or
rewrites the rows of benchmarks/import_traces.csv.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measured import MACHINE, ROOT, write_rows

GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(Params)"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ROWS = "import_traces.csv"
KERNELS_PER_STEP = 2_000
HEAD: dict[str, Any] = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
    "record_shapes": 1,
    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
    "displayTimeUnit": "ms",
    "baseTimeNanoseconds": 1735632360000000000,
}


def span(
    category: str, name: str, tid: int, ts: float, dur: float, args: dict[str, Any], pid: int = 77
) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def step_events(step: int, stacks: bool) -> Iterator[dict[str, Any]]:
    begin = 4203669604595.407 + step * 60_000.0
    yield span("user_annotation", f"ProfilerStep#{step}", 77, begin, 60_000.0, {"External id": step})
    for index in range(KERNELS_PER_STEP):
        number = step * KERNELS_PER_STEP + index + 1
        at = begin + 20 + index * 29.0
        backward = index > KERNELS_PER_STEP // 3
        thread = 78 if backward else 77
        sizes = {"Input Dims": [[4096, 4096], [4096, 1024]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
        for depth in range(8 if stacks else 0):
            place = {"Python parent id": depth, "Python id": 8 * number + depth, "Ev Idx": 8 * number + depth}
            name = f"modeling_llama.py({depth * 37 + index % 50}): forward"
            yield span("python_function", name, thread, at + 0.01 * depth, 19.9 - 0.01 * depth, place)
        own = {"External id": number, "Record function id": 0, "Sequence number": index, "Fwd thread id": int(backward)}
        yield span("cpu_op", "aten::linear", thread, at, 19.5, {**own, **sizes, "Ev Idx": 2 * number})
        yield span("cpu_op", "aten::mm", thread, at + 1, 14.25, {**own, **sizes, "Ev Idx": 2 * number + 1})
        cuda = {"External id": number, "cbid": 211, "correlation": number}
        yield span("cuda_runtime", "cudaLaunchKernel", thread, at + 3, 4.125, cuda)
        yield {"ph": "s", "id": number, "pid": 77, "tid": thread, "ts": at + 3, "cat": "ac2g", "name": "ac2g"}
        name, stream = (ALL_REDUCE, 20) if index % 50 == 49 else (GEMM if index % 2 else ADD, 7)
        on_device = {
            "External id": number, "queued": 0, "device": 0, "context": 1, "stream": stream, "correlation": number,
            "registers per thread": 168, "shared memory": 98304, "blocks per SM": 0.484848, "warps per SM": 3.878788,
            "grid": [16, 4, 1], "block": [256, 1, 1], "est. achieved occupancy %": 0,
        }  # fmt: skip
        if stream == 20:
            on_device |= {"Collective name": "allreduce", "In msg nelems": 4_194_304, "Out msg nelems": 4_194_304}
            on_device |= {"Group size": 8, "dtype": "BFloat16", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"}
        yield span("kernel", name, stream, at + 20.5, 26.75, on_device, pid=0)
        yield {
            "ph": "f",
            "id": number,
            "pid": 0,
            "tid": stream,
            "ts": at + 20.5,
            "cat": "ac2g",
            "name": "ac2g",
            "bp": "e",
        }


def write_trace(path: Path, size_bytes: float, stacks: bool) -> int:
    """The number of events in a trace of that size."""
    events, step = 0, 0
    with path.open("w") as file:
        file.write(json.dumps(HEAD, indent=2)[:-2] + ',\n  "traceEvents": [\n')
        while file.tell() < size_bytes:
            for event in step_events(step, stacks):
                file.write(f"{',' if events else ''}\n  {json.dumps(event, indent=1)}")
                events += 1
            step += 1
        file.write('\n  ],\n  "traceName": "trace.json"\n}\n')
    return events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[300, 1000])
    parser.add_argument("--stacks", action="store_true")
    options = parser.parse_args()
    rows = {}
    kept = ROOT / "benchmarks" / ROWS
    if kept.is_file():
        with kept.open(newline="") as file:
            rows = {(row["megabytes"], row["stacks"]): row for row in csv.DictReader(file)}
    for megabytes in sorted(options.megabytes):
        row = measured(megabytes, options.stacks)
        print(row, flush=True)
        rows[row["megabytes"], row["stacks"]] = row
    write_rows(ROWS, [rows[key] for key in sorted(rows, key=lambda key: (key[1], int(key[0])))])


def measured(megabytes: int, stacks: bool) -> dict[str, str]:
    """The row of one trace; a run of its own process, so that its peak is its own."""
    with tempfile.TemporaryDirectory() as folder:
        trace, record = Path(folder) / "rank-0.json", Path(folder) / "record.yaml"
        events = write_trace(trace, megabytes * 1e6, stacks)
        begun = time.perf_counter()
        command = [sys.executable, "-m", "mmplan", "import", "kineto", str(trace), "-o", str(record)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        assert status == 0, f"mmplan import ended with status {status}"
        return {
            "megabytes": str(round(trace.stat().st_size / 1e6)),
            "stacks": str(stacks).lower(),
            "events": str(events),
            "seconds": f"{seconds:.1f}",
            "peak_rss_megabytes": str(round(usage.ru_maxrss * 1024 / 1e6)),
            "machine": MACHINE,
        }


if __name__ == "__main__":
    main()
