"""What the executor costs per action, beside the actions themselves.

    python benchmarks/runtime.py        # rewrites benchmarks/runtime.csv

Stages here do nothing, so a step's time is the executor's. `alone`: one process, forwards and backwards. `chain`: two
processes, whose second gets a tensor of 4 KiB for every forward and sends its gradient back (gloo, loopback); of both
the slower counts. `timing`: reading the clock, three times an action. Each is the median of several steps of 1,000
microbatches. `share` is that over the median forward of the tiny scenario's plan, measured in the same minute.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
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
from mmplan.runtime.clock import WallClock
from mmplan.runtime.executor import run_step
from mmplan.runtime.launch import execute
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


def run_rank(rank: int, ranks: int, folder: str) -> None:
    """Writes this rank's seconds per action, the median of its steps."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{ranks}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    clock, own = WallClock(dist.new_group(range(ranks)), one_host=True), program(rank, ranks)
    stage = EmptyStage(sends=rank == 0 and ranks > 1, returns=rank == 1)
    seconds = []
    for _ in range(STEPS):
        clock.start()
        started = time.perf_counter()
        run_step(own, {rank: stage}, device=CPU, clock=clock)
        seconds.append((time.perf_counter() - started) / len(own.actions))
    Path(folder, f"{ranks}-{rank}").write_text(str(statistics.median(seconds)))
    dist.destroy_process_group()


def seconds_per_action(ranks: int) -> float:
    with TemporaryDirectory() as folder:
        mp.spawn(run_rank, (ranks, folder), nprocs=ranks)
        return max(float(Path(folder, f"{ranks}-{rank}").read_text()) for rank in range(ranks))


def timing_s() -> float:
    """Of the three readings of the clock that an action has."""
    rounds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        for _ in range(3 * MICROBATCHES):
            time.perf_counter()
        rounds.append((time.perf_counter() - started) / MICROBATCHES)
    return statistics.median(rounds)


def tiny_forward_s() -> float:
    """Median forward of the slowest stage of the tiny scenario's plan, in real processes."""
    plan = optimize(load_scenario(ROOT / "scenarios" / "tiny.yaml")).plan
    run = execute(plan, local=plan.rank_count, steps=10)
    assert run is not None
    return max(entry.median_s for entry in run.actions if entry.kind == "F")


def main() -> None:
    forward_s = tiny_forward_s()
    measured = {"alone": seconds_per_action(1), "chain": seconds_per_action(2), "timing": timing_s()}
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
