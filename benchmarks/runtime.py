"""What the executor costs per action, beside the actions themselves.

    python benchmarks/runtime.py        # rewrites benchmarks/runtime.csv

Stages here do nothing, so a step's time is the executor's. `alone`: one process, forwards and backwards; `untimed`: the
same steps in turn with a clock that reads nothing; `timing`: what reading it adds, the median of the differences.
`chain`: two processes, whose second gets a tensor of 4 KiB for every forward and sends its gradient back (gloo,
loopback); of both the slower counts. Each is the median of several steps of 1,000 microbatches. `share` is that over
the median forward of the tiny scenario's plan, measured in the same minute. `benchmarks/gpu_check.py` does the same
with the events of a GPU.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measured import MACHINE, ROOT, write_rows
from torch import Tensor

from mmplan.planner.program import Action, RankProgram
from mmplan.planner.search import optimize
from mmplan.runtime.clock import Clock, CudaClock, WallClock
from mmplan.runtime.executor import run_step
from mmplan.runtime.launch import execute
from mmplan.runtime.streams import streams_of
from mmplan.scenario.load import load_scenario

MICROBATCHES, STEPS = 1000, 7
CPU, BYTES = torch.device("cpu"), 4096


class EmptyStage:
    """Hands on one tensor and computes nothing (see `Stage`)."""

    def __init__(self, *, sends: bool, returns: bool) -> None:
        self._sent = {"a>b": torch.zeros(BYTES, dtype=torch.uint8)} if sends else {}
        self._returned = {"a<b": torch.zeros(BYTES, dtype=torch.uint8)} if returns else {}

    def forward(self, microbatch: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._sent

    def backward(self, microbatch: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._returned

    def backward_input(self, microbatch: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._returned

    def backward_weight(self, microbatch: int) -> None: ...

    def reads(self, *, gradients: bool) -> Sequence[str]:
        return ()

    def reduce(self) -> None: ...

    def step(self) -> None: ...

    def moved_bytes(self) -> int:
        return 0

    def losses(self) -> dict[str, float]:
        return {}

    def memory_bytes(self) -> int:
        return 0


def program(rank: int, ranks: int) -> RankProgram:
    """All forwards, then all backwards, so that no rank waits for the round trip of one tensor."""
    forwards: list[Action] = []
    backwards: list[Action] = []
    for j in range(MICROBATCHES):
        got, sent = Action("RECV", rank, j, 1 - rank, "", BYTES), Action("SEND", rank, j, 1 - rank, "", BYTES)
        received = [replace(got, tensor="a>b" if rank else "a<b")] if ranks > 1 else []
        handed = [replace(sent, tensor="a<b" if rank else "a>b")] if ranks > 1 else []
        forwards += [*(received if rank else []), Action("F", rank, j), *([] if rank else handed)]
        backwards += [*([] if rank else received), Action("B", rank, j), *(handed if rank else [])]
    return RankProgram(rank=rank, stage=rank, replica=0, actions=(*forwards, *backwards))


class NoClock:
    """Reads nothing."""

    def start(self) -> None: ...

    def mark(self) -> None: ...

    def stop(self) -> None: ...

    def seconds(self, mark: object) -> float:
        raise ValueError("nothing was read")


def run_rank(rank: int, ranks: int, folder: str, kind: str) -> None:
    """Writes this rank's seconds per action, timed and untimed, of each step."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    control, own = dist.new_group(range(ranks)), program(rank, ranks)
    device = torch.device(kind, 0) if kind == "cuda" else CPU
    clocks: tuple[Clock, ...] = (
        CudaClock(control) if kind == "cuda" else WallClock(control, one_host=True),
        NoClock(),
    )
    stage = EmptyStage(sends=rank == 0 and ranks > 1, returns=rank == 1)
    steps = []
    for _ in range(1 + STEPS):
        for clock in clocks:
            dist.barrier(control)
            clock.start()
            started = time.perf_counter()
            run_step(own, {rank: stage}, device=device, clock=clock)
            if kind == "cuda":
                torch.cuda.synchronize()
            steps.append((time.perf_counter() - started) / len(own.actions))
    # The first of each makes what all others use again.
    Path(folder, str(rank)).write_text(json.dumps([steps[2::2], steps[3::2]]))
    dist.destroy_process_group()


def seconds_per_action(ranks: int, kind: str = "cpu") -> tuple[float, float, float]:
    """Timed, untimed, and what timing adds: medians over the steps of the slower rank."""
    with TemporaryDirectory() as folder:
        mp.spawn(run_rank, (ranks, folder, kind), nprocs=ranks)
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]
    timed, untimed = max(found, key=lambda steps: statistics.median(steps[0]))
    differences = [on - off for on, off in zip(timed, untimed, strict=True)]
    return statistics.median(timed), statistics.median(untimed), statistics.median(differences)


def copy_beside_products() -> float:
    """Of a copy to the host, which leaves on the stream that sends, the part that products on a GPU hide; in a process
    of its own, so that this one holds no memory of the device."""
    with TemporaryDirectory() as folder:
        mp.spawn(copy_rank, (folder,), nprocs=1)
        return float(Path(folder, "hidden").read_text())


def copy_rank(rank: int, folder: str) -> None:
    device = torch.device("cuda", 0)
    streams, tensor = streams_of(device), torch.ones(2**27, device=device)
    host, factor = torch.empty(tensor.shape, pin_memory=True), torch.randn(8192, 8192, device=device)

    def copy() -> None:
        with streams.sending(tensor):
            host.copy_(tensor, non_blocking=True)

    def products() -> None:
        for _ in range(8):
            factor @ factor

    def took_s(*works: Callable[[], None]) -> float:
        times = []
        for _ in range(1 + STEPS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for work in works:
                work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    alone_s, beside_s, both_s = took_s(copy), took_s(products), took_s(copy, products)
    Path(folder, "hidden").write_text(str((alone_s + beside_s - both_s) / min(alone_s, beside_s)))


def tiny_forward_s() -> float:
    """Median forward of the slowest stage of the tiny scenario's plan, in real processes."""
    plan = optimize(load_scenario(ROOT / "scenarios" / "tiny.yaml")).plan
    run = execute(plan, local=plan.rank_count, steps=10)
    assert run is not None
    return max(entry.median_s for entry in run.actions if entry.kind == "F")


def main() -> None:
    forward_s = tiny_forward_s()
    timed_s, untimed_s, timing_s = seconds_per_action(1)
    measured = {"alone": timed_s, "untimed": untimed_s, "timing": timing_s, "chain": seconds_per_action(2)[0]}
    rows = [
        {
            "what": what,
            "us_per_action": f"{1e6 * seconds:.2f}",
            "tiny_forward_ms": f"{1e3 * forward_s:.2f}",
            "share": f"{seconds / forward_s:.3%}",
            "machine": MACHINE,
        }
        for what, seconds in measured.items()
    ]
    for row in rows:
        print(*list(row.values())[:4], sep="\t")
    write_rows("runtime.csv", rows)


if __name__ == "__main__":
    main()
