"""Runs of `execute(..., local=N)` in processes that are there already: to start torchrun takes longer than most runs.

Everything but torchrun is that of a run: each process does with the launcher's folder what
`mmplan.runtime.worker` does.
"""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from case_processes import multiprocessing
from worker_runs import WorkerRuns

from mmplan.errors import RunError
from mmplan.runtime.launch import _tell
from mmplan.runtime.limits import Limits
from mmplan.runtime.local_failure import cause_of_failure, keep_failure
from mmplan.runtime.measurement import OnNote, OnStep

_PATIENCE_S = 100.0  # then whoever still works is stuck
_REPORT_S = 2.0  # for other ranks to speak behind the first failure


def _serve(rank: int, folder: str, asked: Connection) -> None:
    runs = WorkerRuns(rank, Path(folder))
    while True:
        scratch, count = asked.recv()
        asked.send(runs.work(Path(scratch), count))


class RunPool:
    """Processes that all runs share, until one fails; `folder()` is a new one in which they meet."""

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder, self._place = folder, ""
        self._ranks: list[tuple[Any, Connection]] = []

    def run(
        self,
        scratch: Path,
        count: int,
        limit: Limits,
        failure_file: Path | None,
        on_step: OnStep | None,
        on_note: OnNote | None,
    ) -> None:
        """In place of `launch._run_processes`."""
        (scratch / "log").touch()
        self._start(count)
        try:
            self._work(scratch, count, failure_file, on_step, on_note)
        except BaseException:  # they may be stuck, or at work for nobody
            self.close()
            raise

    def _work(
        self, scratch: Path, count: int, failure_file: Path | None, on_step: OnStep | None, on_note: OnNote | None
    ) -> None:
        """One run, which raises where a process fails or is stuck."""
        waiting = [connection for _, connection in self._ranks[:count]]
        for connection in waiting:
            connection.send((str(scratch), count))
        codes, deadline = list[int](), time.monotonic() + _PATIENCE_S
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for connection in wait(waiting, left_s):
                assert isinstance(connection, Connection)
                waiting.remove(connection)
                try:
                    codes.append(connection.recv())
                except (EOFError, OSError):
                    codes.append(1)
                if codes[-1] != 0:
                    deadline = min(deadline, time.monotonic() + _REPORT_S)
        _tell(scratch, 0, on_step, on_note)
        if waiting or any(codes):
            cause = cause_of_failure(scratch, 1, {}, overdue=False)
            raise RunError(cause + keep_failure(failure_file, scratch, cause))

    def _start(self, count: int) -> None:
        """Those of the first `count` that are not there yet."""
        if not self._ranks:
            self._place = str(self._folder())
        context = multiprocessing.get_context("forkserver")
        for rank in range(len(self._ranks), count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._place, there), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    def close(self) -> None:
        """They may be stuck, and what they say is of no use."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []
