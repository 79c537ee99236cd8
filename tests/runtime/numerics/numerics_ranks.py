"""Cases of the numerics that several processes run: each result is compared with one process by the tests."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_cases(rank: int, folder: str, size: int, cases: Mapping[str, Callable[[int], Any]]) -> None:
    """Save what each case returns on this rank."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    results = {name: case(rank) for name, case in cases.items()}
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
