"""What the ranks of a run tell each other when it fails, over the store that they met at.

It is there before the process groups are and stays when they break. In a good run each rank now and then asks it
whether another one has failed, which takes some 20 us, and leaves word of where it is.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mmplan.runtime.position import Seen, read_position, seen_document, seen_from
from mmplan.runtime.torchrun import attempt

_MEET_TIMEOUT = timedelta(seconds=60)
_RANKS_PER_POLL_S = 1000  # that the store's one thread answers without getting busy


class Board:
    """The keys of one attempt of a run.

    Args:
        folder: where ranks of this host keep their positions.

    Raises:
        RuntimeError: nobody answers at the address in the environment.
    """

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        self.rank, self.world, self._folder = rank, world, folder
        self.poll_s = max(0.5, world / _RANKS_PER_POLL_S)
        self._store = _store(rank)
        self._prefix = f"mmplan/{attempt()}/"

    def meeting(self) -> Any:
        """Where the process groups find each other: a connection of its own, because a rank that waits for others holds
        one, and keys of this attempt, because the addresses of processes that have ended stay in the store."""
        return dist.PrefixStore(f"{self._prefix}groups", _store(self.rank))  # type: ignore[attr-defined]

    def claim(self) -> bool:
        """Whether this process is the first to report a failure."""
        return int(self._store.add(f"{self._prefix}claims", 1)) == 1

    def failed(self) -> bool:
        return self._has("claims")

    def report(self, text: str) -> None:
        """What this process, the first, has to say; gives the others time to read it, because the store ends when all
        processes of the first host have."""
        self._set("report", f"{self.rank} {text}")
        if len(self.neighbours()) + 1 < self.world:
            time.sleep(2 * self.poll_s)

    def reported(self, wait_s: float) -> tuple[int, str] | None:
        """Who was the first and what it said, once it has; None if it does not in time."""
        if not self._soon(lambda: self._has("report"), wait_s):
            return None
        rank, _, text = self._get("report").partition(" ")
        return int(rank), text

    def leave_word(self, seen: Seen) -> None:
        """Where this rank is, for the case that it can no longer be asked."""
        self._set(f"seen/{self.rank}", json.dumps(seen_document(seen)))

    def asked(self) -> bool:
        return self._has("ask")

    def answer(self, seen: Seen) -> None:
        """What this rank does, and what the others of this host last wrote."""
        for other in self.neighbours():
            found = read_position(self._folder, other)
            if found is not None:
                self._set(f"file/{other}", json.dumps(seen_document(found)))
        self._set(f"said/{self.rank}", json.dumps(seen_document(seen)))

    def gone(self, rank: int) -> None:
        """The process of a rank has closed its connections."""
        self._set(f"gone/{rank}", "1")

    def neighbours(self) -> list[int]:
        """Other ranks of this host."""
        ranks = [int(path.name.partition("-")[2]) for path in self._folder.glob("position-*")]
        return sorted(rank for rank in ranks if rank != self.rank)

    def collect(self, own: Seen) -> dict[int, Seen]:
        """What every rank does, as far as it can be told; asks all, and gives them some time to answer."""
        self._set("ask", "1")
        others = [rank for rank in range(self.world) if rank != self.rank]
        silent = set(others)

        def answered() -> bool:
            silent.difference_update([r for r in silent if self._has(f"said/{r}") or self._is_gone(r)])
            return not silent

        self._soon(answered, 3 * self.poll_s)
        found = {rank: self._of(rank) for rank in others}
        return {self.rank: own} | {rank: seen for rank, seen in found.items() if seen is not None}

    def _of(self, rank: int) -> Seen | None:
        """A rank's own answer, else what its host or its last word says."""
        if self._has(f"said/{rank}"):
            return seen_from(json.loads(self._get(f"said/{rank}")))
        seen = read_position(self._folder, rank)
        for key in (f"file/{rank}", f"seen/{rank}"):
            if seen is None and self._has(key):
                seen = seen_from(json.loads(self._get(key)))
                seen = replace(seen, alive=seen.alive if key.startswith("file") else None)
        if seen is None:
            return None
        ended = self._has(f"gone/{rank}") or seen.alive is False
        return replace(seen, alive=False if ended else None)  # alive, but it does not answer

    def _is_gone(self, rank: int) -> bool:
        seen = read_position(self._folder, rank)
        return self._has(f"gone/{rank}") or (seen is not None and seen.alive is False)

    def _soon(self, told: Callable[[], bool], wait_s: float) -> bool:
        deadline_s = time.monotonic() + wait_s
        while not told():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(self.poll_s / 10)
        return True

    def _has(self, key: str) -> bool:
        return bool(self._store.check([self._prefix + key]))

    def _get(self, key: str) -> str:
        value: bytes = self._store.get(self._prefix + key)
        return value.decode(errors="replace")

    def _set(self, key: str, value: str) -> None:
        self._store.set(self._prefix + key, value)


def _store(rank: int) -> Any:
    """torchrun's, or where processes are started by something else the first one's."""
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not hosted,
        timeout=_MEET_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,  # both connections of a process share the port
    )
