"""Cases that processes run together: one start for all of a module, because starting costs more than running."""

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import multiprocessing

T = TypeVar("T")
# What a server of processes imports once, so that each process it forks has not to: half of the time of most cases.
multiprocessing.set_forkserver_preload(["mmplan.runtime.worker", "transformers.models.llava.modeling_llava"])
EVERY_PLAN = bool(os.environ.get("MMPLAN_EVERY_PLAN"))


def chosen(plans: Mapping[str, T], mixed: Collection[str]) -> dict[str, T]:
    """Plans but for those that mix what others have one by one: these run too with `make test-plans`."""
    return {name: plan for name, plan in plans.items() if EVERY_PLAN or name not in mixed}


def run_on_ranks(worker: Callable[..., None], processes: int, folder: Path) -> list[Any]:
    """What `worker(rank, folder)` saves as `rank{rank}.pt`, by rank; processes that hang are killed."""
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
