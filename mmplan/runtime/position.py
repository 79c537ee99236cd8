"""What a rank is doing and whom it waits for, kept where others can read it: also when the rank is killed or stopped.

A line of text in memory that a file maps: one write costs about a microsecond, needs no system call, and the kernel
keeps it whatever happens to the process. Imports no torch, because the launcher reads it.
"""

import mmap
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mmplan.runtime.inject import Injection, strike

_RECORD_BYTES = 1024
NO_STEP = -1  # before the first step and behind the last
DONE = "done"

_WORDS = {
    "start": "the start of the run",
    "data": "the data of the step",
    "meet": "the barrier before the step",
    "agree": "the agreement on the update",
    "drain": "the sends at the end of the step",
    "tell": "the exchange of losses behind the step",
    "save": "the checkpoint behind the step",
    "end": "the end of the run",
}

_ACTION = re.compile(r"(\d+)(F|B|I|W|TIE|REDUCE|STEP|SEND|RECV)(\d*)(?:\[(.*)\]@(\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A rank at one moment.

    Attributes:
        step: -1 before the first.
        place: an action such as `1F3`, or a part of a run in words.
        waits: for whom: `RANK RECV:TENSOR MICROBATCH` for a tensor (or SEND), `all`, or empty.
        age_s: since when place and waits are these; step_age_s: since when the step runs.
        line: of the user's code or a library where it was, empty if unknown.
        collective: whether that is inside a collective or a transfer.
        alive: whether its process exists; None where nobody can tell.
        done: it has left the run as it should.
    """

    rank: int
    host: str
    pid: int = 0
    step: int = NO_STEP
    place: str = "start"
    waits: str = ""
    age_s: float = 0.0
    step_age_s: float = 0.0
    line: str = ""
    collective: bool = False
    alive: bool | None = None
    done: bool = False


class Position:
    """Where this rank is. Faults to rehearse strike where the position says (`inject.py`).

    Args:
        path: of the file that others read; None: only this process knows.
    """

    def __init__(self, rank: int = 0, path: Path | None = None, faults: tuple[Injection, ...] = ()) -> None:
        self._rank, self._host, self._pid = rank, socket.gethostname(), os.getpid()
        self._faults = tuple(fault for fault in faults if fault.rank == rank)
        self._step, self._place, self._waits = NO_STEP, "start", ""
        self._step_since_s = self._since_s = time.monotonic()
        self._memory: mmap.mmap | bytearray = bytearray(_RECORD_BYTES) if path is None else _mapped(path)
        self._write()

    def begin(self, step: int) -> None:
        """A step starts here."""
        self._step, self._step_since_s = step, time.monotonic()

    def enter(self, place: object, waits: str = "") -> None:
        """From here on the rank does `place`, an action or words for another part of the run."""
        self._place, self._waits, self._since_s = str(place), waits, time.monotonic()
        self._write()
        for fault in self._faults:
            if fault.strikes(self._step, self._place):
                strike(fault)

    def wait(self, waits: str) -> None:
        """At the same place it waits for others, or with an empty text no longer."""
        self._waits, self._since_s = waits, time.monotonic()
        self._write()

    def poisoned(self) -> bool:
        """Whether what is made here is to be no number, for rehearsal."""
        return any(fault.kind == "nan" and fault.at(self._step, self._place) for fault in self._faults)

    def seen(self) -> Seen:
        """As others see it."""
        now_s = time.monotonic()
        return Seen(
            rank=self._rank,
            host=self._host,
            pid=self._pid,
            step=self._step,
            place=self._place,
            waits=self._waits,
            age_s=now_s - self._since_s,
            step_age_s=now_s - self._step_since_s,
            alive=True,
            done=self._place == DONE,
        )

    def _write(self) -> None:
        text = (
            f"{self._pid}\t{self._host}\t{self._step}\t{self._step_since_s:.3f}\t{self._place}\t{self._waits}\t"
            f"{self._since_s:.3f}\t"
        )
        line = text.encode()[:_RECORD_BYTES]
        self._memory[: len(line)] = line


def position_path(folder: Path, rank: int) -> Path:
    return folder / f"position-{rank}"


def read_position(folder: Path, rank: int) -> Seen | None:
    """What a rank of this host last wrote; None where it wrote nothing that can be read."""
    try:
        parts = position_path(folder, rank).read_bytes().decode(errors="replace").split("\t")
        pid, host, step, step_since_s, place, waits, since_s = parts[:7]
        now_s = time.monotonic()  # one clock for all processes of a host
        return Seen(
            rank=rank,
            host=host,
            pid=int(pid),
            step=int(step),
            place=place,
            waits=waits,
            age_s=now_s - float(since_s),
            step_age_s=now_s - float(step_since_s),
            alive=process_lives(int(pid)),
            done=place == DONE,
        )
    except (OSError, ValueError):
        return None


def process_lives(pid: int) -> bool:
    """Whether a process of this host exists and is more than an exit code that its parent has not read. Threads that
    still write keep its files open, also when the first one has ended."""
    state = process_state(pid)
    try:
        return state == "?" or (state != "" and (state not in "ZX" or len([*Path(f"/proc/{pid}/task").iterdir()]) > 1))
    except OSError:
        return False


def process_state(pid: int) -> str:
    """The kernel's letter: T halted, Z ended; empty where there is none, `?` where nobody can tell."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return ""
    except (OSError, IndexError):  # another user's, or a system without /proc
        return "?"


def seen_document(seen: Seen) -> dict[str, object]:
    return asdict(seen)


def seen_from(document: Mapping[str, object]) -> Seen:
    return replace(Seen(rank=0, host=""), **document)  # type: ignore[arg-type]


def _mapped(path: Path) -> mmap.mmap:
    with path.open("w+b") as file:
        file.truncate(_RECORD_BYTES)
        return mmap.mmap(file.fileno(), _RECORD_BYTES)


def place_words(place: str) -> str:
    """`F(3) of stage 1` for `1F3`; other places are words already."""
    action = _ACTION.fullmatch(place)
    if action is None:
        return _WORDS.get(place, place)
    stage, kind, microbatch, tensor, peer = action.groups()
    if kind == "SEND":
        return f"the send of {tensor} of microbatch {microbatch} to rank {peer}"
    if kind == "RECV":
        return f"the receive of {tensor} of microbatch {microbatch} from rank {peer}"
    if kind == "TIE":
        return f"the sum of gradients that stage {stage} shares with others"
    return f"{kind}({microbatch}) of stage {stage}" if microbatch else f"{kind} of stage {stage}"


def where(seen: Seen) -> str:
    """`step 3, F(3) of stage 1`."""
    step = f"step {seen.step}, " if seen.step != NO_STEP else ""
    return step + place_words(seen.place)
