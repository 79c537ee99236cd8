"""Small traces of the PyTorch profiler, written by ourselves in its format. Times in microseconds."""

import gzip
import json
from pathlib import Path
from typing import Any

from mmplan.scenario.formats.reading import Reading

Event = dict[str, Any]
MAIN, AUTOGRAD = 100, 200
GEMM = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, Array<char*, 3> >(int)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def span(category: str, name: str, ts: float, dur: float, *, pid: Any = 1, tid: Any = MAIN, **args: Any) -> Event:
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def operator(name: str, ts: float, dur: float, *, tid: int = MAIN, **args: Any) -> Event:
    return span("cpu_op", name, ts, dur, tid=tid, **args)


def mark(name: str, ts: float, dur: float, *, tid: int = MAIN, **args: Any) -> Event:
    return span("user_annotation", name, ts, dur, tid=tid, **args)


def call(name: str, ts: float, dur: float, correlation: int = 0, *, tid: int = MAIN) -> Event:
    return span("cuda_runtime", name, ts, dur, tid=tid, cbid=211, correlation=correlation)


def kernel(
    name: str, ts: float, dur: float, correlation: int = 0, *, stream: int = 7, device: int = 0, **args: Any
) -> Event:
    own = {"device": device, "stream": stream, "correlation": correlation, **args}
    return span("kernel", name, ts, dur, pid=device, tid=stream, **own)


def launched(
    name: str, at: float, dur: float, correlation: int, *, tid: int = MAIN, stream: int = 7, **args: Any
) -> list[Event]:
    """A kernel that begins 10 us after the beginning of its launch at `at` - 10."""
    return [
        call("cudaLaunchKernel", at - 10, 5, correlation, tid=tid),
        kernel(name, at, dur, correlation, stream=stream, **args),
    ]


def collective(elements: int, ranks: int = 2, name: str = "allreduce") -> dict[str, Any]:
    return {
        "Collective name": name,
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "Group size": ranks,
        "dtype": "BFloat16",
        "Process Group Name": "0",
        "Process Group Ranks": str(list(range(ranks))),
    }


def write(path: Path, events: list[Event], **head: Any) -> Path:
    content = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2}, **head}
    content = {key: value for key, value in content.items() if value is not None}
    text = json.dumps({**content, "traceEvents": events, "traceName": "t.json"}, indent=1)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def two_steps() -> list[dict[str, Any]]:
    """Steps of 20 ms: 8 ms product, 4 ms all-reduce of which 2 ms lie under a second product of 3 ms, 9 ms idle."""
    events = []
    for step in range(2):
        begin = 1_000_000 + 20_000 * step
        ids = 10 * (step + 1)
        events += [
            mark(f"ProfilerStep#{step + 5}", begin, 20_000),
            operator("aten::mm", begin + 80, 30, **{"Sequence number": ids, "Fwd thread id": 0, "External id": ids}),
            *launched(GEMM, begin + 100, 8_000, ids + 1),
            operator("autograd::engine::evaluate_function: MmBackward0", begin + 8_080, 60, tid=AUTOGRAD),
            operator("aten::mm", begin + 8_085, 40, tid=AUTOGRAD, **{"Sequence number": ids, "Fwd thread id": 1}),
            *launched(GEMM, begin + 8_100, 3_000, ids + 2, tid=AUTOGRAD),
            *launched(ALL_REDUCE, begin + 9_100, 4_000, ids + 3, tid=AUTOGRAD, stream=20, **collective(1_000_000)),
            call("cudaDeviceSynchronize", begin + 8_200, 4_950),
        ]
    return events


def only_rank(reading: Reading) -> dict[str, Any]:
    document: Any = reading.fragment
    (rank,) = document["ranks"]
    return dict(rank)


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows}
