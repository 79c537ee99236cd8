"""Cases that processes run together: one start for all of a module, because starting costs more than running."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing


def run_on_ranks(worker: Callable[..., None], processes: int, folder: Path) -> list[Any]:
    """What `worker(rank, folder)` saves as `rank{rank}.pt`, by rank; processes that hang are killed."""
    context = multiprocessing.start_processes(
        worker, args=(str(folder),), nprocs=processes, join=False, start_method="spawn"
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
