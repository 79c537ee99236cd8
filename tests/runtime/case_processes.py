"""Cases that processes run together: one start for all of a module, because starting costs more than running."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import multiprocessing

T = TypeVar("T")
GIVEN = "given.pt"
# What a server of processes imports once, so that each process it forks has not to: half of the time of most cases.
multiprocessing.set_forkserver_preload(["mmplan.runtime.worker", "transformers.models.llava.modeling_llava"])
EVERY_PLAN = bool(os.environ.get("MMPLAN_EVERY_PLAN"))


def chosen(plans: Mapping[str, T], mixed: Collection[str]) -> dict[str, T]:
    """Plans but for those that mix what others have one by one: these run too with `make test-plans`."""
    return {name: plan for name, plan in plans.items() if EVERY_PLAN or name not in mixed}


def run_on_ranks(worker: Callable[..., None], processes: int, folder: Path, given: Any = None) -> list[Any]:
    """What `worker(rank, folder)` saves as `rank{rank}.pt`, by rank; processes that hang are killed.

    Args:
        given: what `given_to(folder)` hands to each of them, such as plans, which take longer to make than to read.
    """
    torch.save(given, folder / GIVEN)
    context = multiprocessing.start_processes(
        worker, args=(str(folder),), nprocs=processes, join=False, start_method="forkserver"
    )
    try:
        for _ in range(processes):
            if context.join(timeout=100):
                break
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(processes)]


def given_to(folder: str) -> Any:
    return torch.load(Path(folder) / GIVEN, weights_only=False)


@contextmanager
def meeting(rank: int, folder: str, processes: int, *, timeout_s: float = 60.0) -> Iterator[dict[Any, Any]]:
    """One of the processes, in a group with the others: the results to fill in, which are saved in the end."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store, timeout = dist.FileStore(f"{folder}/store", processes), timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=timeout)
    results: dict[Any, Any] = {}
    yield results
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
