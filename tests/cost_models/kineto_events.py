"""Small traces of the PyTorch profiler, written by ourselves in its format. Times in microseconds."""

import gzip
import json
from pathlib import Path
from typing import Any

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
