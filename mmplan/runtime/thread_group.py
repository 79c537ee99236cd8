"""Ranks as threads of one process, which ask before a run what its ranks would say together: trials of small pieces.

One thread works at a time; where ranks meet, each waits for the others. Tensors are those of a CPU.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

T = TypeVar("T")


class Threads:
    """Of one process, each a rank. Attributes: working: held by the one that works; meetings: of ranks, by their
    numbers."""

    def __init__(self) -> None:
        self.working = threading.Lock()
        self._meetings: dict[tuple[int, ...], _Meeting] = {}

    def meeting(self, ranks: tuple[int, ...]) -> "_Meeting":
        """Where these ranks meet."""
        return self._meetings.setdefault(ranks, _Meeting(len(ranks)))

    def groups_of(self, rank: int) -> Callable[[np.ndarray], "ThreadGroup | None"]:
        """Rows of ranks -> the group of the row that holds this one."""

        def group_of(rows: np.ndarray) -> ThreadGroup | None:
            for ranks in rows.tolist():
                if rank in ranks:
                    return ThreadGroup(self, self.meeting(tuple(ranks)), ranks.index(rank))
            return None

        return group_of

    def run(self, ranks: Sequence[int], work: Callable[[int], T]) -> list[T]:
        """What `work(rank)` returns.

        Raises:
            Exception: the first that a rank does.
        """
        found: dict[int, T] = {}
        errors: list[BaseException] = []

        def begin(rank: int) -> None:
            with self.working:
                try:
                    found[rank] = work(rank)
                except threading.BrokenBarrierError:
                    pass  # another rank has said why
                except BaseException as error:
                    errors.append(error)
                    for meeting in self._meetings.values():
                        meeting.barrier.abort()

        threads = [threading.Thread(target=begin, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [found[rank] for rank in ranks]


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size


class ThreadGroup(dist.ProcessGroup):
    """Collectives of `network.py` over threads."""

    def __init__(self, threads: Threads, meeting: _Meeting, index: int) -> None:
        super().__init__(index, len(meeting.values))  # type: ignore[call-arg]  # its stub knows one of two ways
        self._threads, self._meeting, self._index = threads, meeting, index

    def exchanged(self, value: Any) -> list[Any]:
        """What each rank gave, copied. Collective."""
        meeting = self._meeting
        meeting.values[self._index] = tree_map_only(Tensor, lambda x: x.detach().clone(), value)
        self._threads.working.release()
        try:
            meeting.barrier.wait()
            values = list(meeting.values)
            meeting.barrier.wait()
        finally:
            self._threads.working.acquire()
        return values
