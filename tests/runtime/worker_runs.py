"""Whole runs in processes that are there already, one after the other: starting processes takes longer than a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from mmplan.planner.plan import Plan
from mmplan.runtime.board import Board
from mmplan.runtime.measurement import Measurement, OnNote
from mmplan.runtime.run_options import RunOptions
from mmplan.runtime.worker import main, run_worker


class WorkerRuns:
    """One of the processes; they meet in `folder`."""

    def __init__(self, rank: int, folder: Path) -> None:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        torch.set_num_threads(1)
        self._rank, self._folder, self._count = rank, folder, 0
        # torchrun's store, that of the first process here.
        places = dist.FileStore(str(folder / "places"), -1)
        if rank == 0:
            self._agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            places.set("port", str(self._agent.port))
        port = places.get("port").decode()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def run(self, plan: Plan, options: RunOptions, on_note: OnNote | None = None) -> Measurement | None:
        """A run with as many of the processes as the plan needs; the measurement on rank 0."""
        self._count += 1
        world = plan.rank_count
        if self._rank >= world:
            return None
        with self._met(self._folder / f"store{self._count}", world):
            return run_worker(plan, options, None, on_note, print)

    def work(self, scratch: Path, world: int) -> int:
        """A run that a launcher has written down in its folder; returns what the process would end with."""
        with self._met(scratch / "store", world):
            return main([str(scratch)])

    @contextmanager
    def _met(self, file: Path, world: int) -> Iterator[None]:
        os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        store = dist.FileStore(str(file), world)
        with patch.object(Board, "meeting", lambda board: store):  # another one for each run
            yield
