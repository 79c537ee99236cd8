"""One rank's part of a checkpoint: copied between two steps, written by a thread while training goes on."""

import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from mmplan.errors import RunError
from mmplan.runtime.checkpoint.manifest import part_name
from mmplan.runtime.checkpoint.part import key_of, write_part
from mmplan.runtime.checkpoint.pieces import BUFFER, Piece
from mmplan.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenPart:
    """What a rank has written of the checkpoint behind `step` steps; `problem`: why it has not.

    `stall_s`: the copy, for which training stood still. `updates`: as in a manifest.
    """

    step: int
    rank: int
    bytes: int = 0
    sha256: str = ""
    updates: int | None = None
    stall_s: float
    write_s: float
    problem: str | None = None


class PartWriter:
    """Writes this rank's pieces, one checkpoint at a time.

    Args:
        pieces: what this rank writes; live.
        more: further tensors of a moment by key, such as the states of random generators.
        updates: steps that the moments have seen, of a moment.
    """

    def __init__(
        self,
        rank: int,
        pieces: Sequence[Piece],
        more: Callable[[], Mapping[str, Tensor]],
        updates: Callable[[], int | None],
    ) -> None:
        self._rank, self._more, self._updates = rank, more, updates
        self._live = {key: tensor for piece in pieces for key, tensor in _keys(piece).items()}
        self._trained = {key for piece in pieces for key in _keys(piece) if BUFFER not in piece.tensors}
        self._copies: dict[str, Tensor] = {}  # kept from one checkpoint to the next: fresh memory is slower to fill
        self._thread: Thread | None = None
        self._done: WrittenPart | None = None

    def start(self, step: int, folder: Path) -> None:
        """Copy the state behind `step` steps and begin to write it into a folder, which is made."""
        assert self._thread is None and self._done is None, "the part before is not reported"
        started = time.perf_counter()
        part = WrittenPart(step=step, rank=self._rank, updates=self._updates(), stall_s=0.0, write_s=0.0)
        try:
            tensors = {**self._copied(), **self._more()}
        except (MemoryError, RuntimeError) as error:
            size = sum(tensor.nbytes for tensor in self._live.values())
            problem = f"rank {self._rank}: no room for a copy of {format_bytes(size)} in host memory: {error}"
            self._copies, self._done = {}, replace(part, problem=problem)
            return
        part = replace(part, stall_s=time.perf_counter() - started)

        def write() -> None:
            self._done = _written(part, folder, tensors, _not_finite(self._copies, self._trained))

        self._thread = Thread(target=write, daemon=True)  # a disk that hangs must not hold up the end of the process
        self._thread.start()

    def _copied(self) -> dict[str, Tensor]:
        """The live tensors of now, in host memory."""
        if not self._copies:
            self._copies = {key: _host_like(tensor) for key, tensor in self._live.items()}
        for key, tensor in self._live.items():
            self._copies[key].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in self._live.values()):
            torch.cuda.synchronize()
        return self._copies

    def report(self) -> WrittenPart | None:
        """What has been written since the last report, once."""
        if self._thread is not None and self._thread.is_alive():
            return None
        self._thread, self._done, done = None, None, self._done
        return done

    def wait(self, timeout_s: float) -> None:
        """Until nothing is being written.

        Raises:
            RunError: that takes longer than the time-out.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise RunError(f"rank {self._rank} has not written its checkpoint within {format_seconds(timeout_s)}")


def _written(part: WrittenPart, folder: Path, tensors: Mapping[str, Tensor], problem: str | None) -> WrittenPart:
    path, started = folder / part_name(part.rank), time.perf_counter()
    size, digest = 0, ""
    try:
        if problem is None:
            folder.mkdir(exist_ok=True)
            size, digest = write_part(path, tensors)
    except FileNotFoundError:
        problem = f"'{folder.parent}' is not there on {socket.gethostname()}: all hosts have to share the folder"
    except OSError as error:
        needed = sum(tensor.nbytes for tensor in tensors.values())
        problem = f"cannot write {format_bytes(needed)} to '{path}': {error.strerror}{_free(folder)}"
        path.unlink(missing_ok=True)
    except Exception as error:  # a thread has nobody to raise to
        problem = f"cannot write '{path}': {type(error).__name__}: {error}"
    return replace(
        part,
        bytes=size,
        sha256=digest,
        write_s=time.perf_counter() - started,
        problem=problem and f"rank {part.rank}: {problem}",
    )


def _keys(piece: Piece) -> dict[str, Tensor]:
    """Its tensors by their keys in a file."""
    return {key_of(piece.name, kind, piece.box.offset): tensor for kind, tensor in piece.tensors.items()}


def _not_finite(tensors: Mapping[str, Tensor], trained: Set[str]) -> str | None:
    """Weights that are lost already: a checkpoint of them would push out one that can be gone on from."""
    for key, tensor in tensors.items():
        if key in trained and tensor.is_floating_point() and tensor.numel():
            least, most = torch.aminmax(tensor)
            if not (torch.isfinite(least) and torch.isfinite(most)):
                return f"'{key}' has values that are not finite"
    return None


def _free(folder: Path) -> str:
    try:
        return f" ({format_bytes(shutil.disk_usage(folder).free)} are free)"
    except OSError:
        return ""


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
