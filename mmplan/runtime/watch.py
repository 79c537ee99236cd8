"""Ends this process of a run when another has failed or stands still, and tells the others when this one does.

Two threads. One looks every half second: has another rank reported a failure, has a step passed its limit, is this
process asked to end? The other waits for a message that the next rank sends only when it leaves the run: the kernel
closes the connections of a killed process, so its neighbour knows at once. The first to notice gathers what all ranks
do, and says who waits for whom.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mmplan.errors import EndedError, InputError, MmplanError, RunError
from mmplan.planner.plan import Plan
from mmplan.runtime.board import Board
from mmplan.runtime.failure import described, error_line, lost_a_rank, root, short, thread_line, timed_out, trace_of
from mmplan.runtime.inject import Injection
from mmplan.runtime.limits import Limits
from mmplan.runtime.position import (
    DONE,
    NO_STEP,
    Position,
    Seen,
    position_path,
    process_lives,
    process_state,
    read_position,
    where,
)
from mmplan.runtime.termination import Termination
from mmplan.runtime.torchrun import OnFailure, attempt, host_folder, is_local_zero
from mmplan.runtime.wait_chain import lasted, named, wait_chain

_POLLS_PER_WORD = 10  # a rank leaves word of where it is every so many looks
_GRACE_POLLS = 12  # from another rank's failure to the end of this process, for the main thread to end by itself
_SHORT_GRACE_POLLS = 3  # the same once that rank has said all
_FOR_EVER = timedelta(days=365)


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What a watch has to know of the run.

    Attributes:
        folder: where ranks of this host keep their positions; None: a temporary one.
        file: where the whole of a failure is kept; None: nowhere.
        launcher: the process that the run ends with; None: there is none.
    """

    plan: Plan
    rank: int
    world: int
    limits: Limits
    faults: tuple[Injection, ...]
    on_failure: OnFailure
    folder: Path | None = None
    file: Path | None = None
    launcher: int | None = None


class Watch:
    """The watch of one rank. Only one thread of a process reports.

    Attributes:
        position: where the rank is; the run keeps it up to date.
    """

    def __init__(self, watched: Watched) -> None:
        self._run = watched
        self._folder = watched.folder or host_folder()
        faults = watched.faults if attempt() == 0 else ()
        self.position = Position(watched.rank, position_path(self._folder, watched.rank), faults)
        self._board = Board(watched.rank, watched.world, self._folder)
        self._reporting, self._closed, self._gone = threading.Lock(), threading.Event(), threading.Event()
        self._main = threading.get_ident()
        self._termination = Termination()
        self._answered, self._failed_at_s = False, 0.0
        self._heard: tuple[int, str] | None = None  # from the first to report
        self._last: Seen | None = None  # where the main thread has failed
        self._ring: threading.Thread | None = None
        self._group: dist.ProcessGroup | None = None
        threading.Thread(target=self._guard, daemon=True).start()

    def meet(self) -> None:
        """Make the group of all ranks. Collective over all of them."""
        timeout = timedelta(seconds=self._run.limits.start_wait_s)
        store, rank, world = self._board.meeting(), self._run.rank, self._run.world
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        self._follow()

    def _follow(self) -> None:
        """From here on this rank knows at once when the next one is killed. Collective over all ranks."""
        if self._run.world > 1:
            self._group = dist.new_group(backend="gloo", timeout=_FOR_EVER)
            self._ring = threading.Thread(target=self._hear_next, args=(self._group,), daemon=True)
            self._ring.start()

    def close(self) -> None:
        """The run has ended well. Collective over all ranks."""
        self.position.enter(DONE)
        self._leave()
        if self._ring is not None:
            dist.send(torch.ones(1), (self._run.rank - 1) % self._run.world, group=self._group)
            self._ring.join()
            self._group = None  # or it would outlive the other groups

    def ended_by(self, error: BaseException) -> BaseException:
        """The error to end this rank with: what happened where, and whose fault it is."""
        own = replace(self.position.seen(), line=error_line(error), collective=lost_a_rank(error))
        self._last = own
        if isinstance(error, KeyboardInterrupt):
            self._leave()
            return error
        with self._reporting:
            text, first = self._told(error, own)
            self._leave()
        if not first:
            return EndedError(text)
        return error if isinstance(error, InputError) else RunError(text)

    def _told(self, error: BaseException, own: Seen) -> tuple[str, bool]:
        """What to say of an error of the main thread, and whether this rank is the first to say something."""
        lost = lost_a_rank(error)
        try:
            if lost:  # whoever is to blame may be about to say so; a rank that was killed never will
                deadline_s = time.monotonic() + 2 * self._board.poll_s
                while not (self._board.failed() or self._gone.is_set() or time.monotonic() > deadline_s):
                    time.sleep(self._board.poll_s / 10)
            if not self._board.claim():
                return self._secondary(own), False
            text = self._chain(own, error) if lost else _failure_text(error, own)
            self._board.report(text)
        except RuntimeError:  # torchrun's store is gone
            text = _failure_text(error, own)
        return text + self._written(text, trace_of(error)), True

    def _chain(self, own: Seen, error: BaseException | None = None, first: int | None = None) -> str:
        """Who waits for whom, from this rank or another on."""
        seen = self._board.collect(own)
        chain = wait_chain(self._run.plan, self._run.world, seen, own.rank if first is None else first)
        if error is None:
            return chain
        limit_s = timed_out(error)
        late = f"after the time limit of {lasted(limit_s)}: " if limit_s else ""
        return f"{late}{chain}; the error of rank {own.rank}: {short(error)}"

    def _secondary(self, own: Seen) -> str:
        """The first process of each host says why."""
        self._heard = self._heard or self._board.reported(_GRACE_POLLS * self._board.poll_s)
        ended = f"{named(own.rank, own)} ended in {where(own)}"
        if self._heard is None:
            return f"{ended}, because another rank has failed"
        rank, text = self._heard
        return f"{ended}, because: {text}" if is_local_zero() else f"{ended}, because of what rank {rank} reports"

    def _written(self, text: str, trace: str) -> str:
        """Keep the whole of a failure; returns what to say of it."""
        if self._run.file is None:
            return ""
        try:
            self._run.file.write_text(f"{text}\n\n{trace}")
        except OSError:
            return ""
        return f"; the traceback is in {self._run.file} on {self.position.seen().host}"

    def _guard(self) -> None:
        looks = 0
        while not self._closed.is_set():
            try:
                if self._termination.came(self._board.poll_s):
                    self._terminated()
                if not self._closed.is_set():
                    self._look(leave_word=looks % _POLLS_PER_WORD == 0)
            except RuntimeError:
                if self._failed_at_s:
                    self._end(lambda: self._secondary(self._now()))
                self._end(lambda: "torchrun's store does not answer: the torchrun of the first node has ended")
            looks += 1

    def _look(self, *, leave_word: bool) -> None:
        own = self.position.seen()
        limit_s = self._run.limits.step_s if own.step != NO_STEP else self._run.limits.start_s
        if self._board.failed():
            self._outlive()
        elif self._gone.is_set():
            self._end(lambda: self._chain(self._now(), first=(own.rank + 1) % self._run.world))
        elif own.step_age_s > limit_s:
            what = f"step {own.step}" if own.step != NO_STEP else own.place
            self._end(lambda: f"{what} takes longer than the limit of {lasted(limit_s)}: {self._chain(self._now())}")
        elif self._run.launcher is not None and not process_lives(self._run.launcher):
            self._end(lambda: "the process that started the run is gone")
        elif leave_word:
            self._board.leave_word(own)

    def _outlive(self) -> None:
        """Another rank, or the main thread of this one, has failed: answer what is asked, and end in time."""
        self._failed_at_s = self._failed_at_s or time.monotonic()
        if not self._answered and self._board.asked():
            self._board.answer(self._now())
            self._answered = True
        self._heard = self._heard or self._board.reported(0.0)
        grace = _GRACE_POLLS if self._heard is None else _SHORT_GRACE_POLLS
        if time.monotonic() - self._failed_at_s > grace * self._board.poll_s:
            self._end(lambda: self._secondary(self._now()))

    def _terminated(self) -> None:
        """torchrun ends its processes when one of them has died; if that one has not said why, it was killed."""
        own = self.position.seen()
        dead = [rank for rank in self._board.neighbours() if self._was_killed(rank)]
        if dead and not self._board.failed():
            self._end(lambda: self._chain(self._now(), first=dead[0]))
        elif not self._board.failed():
            self._end(lambda: f"{named(own.rank, own)} was asked to end (SIGTERM) in {where(own)}")
        with self._reporting:
            if not self._closed.is_set():
                self._remove()
                self._termination.obey()

    def _neighbour(self, rank: int) -> Seen | None:
        return read_position(self._folder, rank)

    def _was_killed(self, rank: int) -> bool:
        seen = self._neighbour(rank)
        return seen is not None and seen.alive is False and not seen.done

    def _end(self, told: Callable[[], str]) -> None:
        """End this process, unless the main thread does."""
        with self._reporting:
            if self._closed.is_set():
                return
            self._last = self._now()
            text = ""
            with suppress(RuntimeError):
                if not self._board.claim():
                    text = self._secondary(self._last)
            if not text:
                text = told()
                with suppress(RuntimeError):
                    self._board.report(text)
                text += self._written(text, "")
            self._run.on_failure(text)
            self._remove()
            os._exit(RunError.exit_code)

    def _now(self) -> Seen:
        """Where the main thread is, or where it failed."""
        if self._last is not None:
            return self._last
        line, collective = thread_line(self._main)
        return replace(self.position.seen(), line=line, collective=collective)

    def _hear_next(self, group: dist.ProcessGroup) -> None:
        rank = (self._run.rank + 1) % self._run.world
        try:
            dist.recv(torch.zeros(1), rank, group=group)
        except RuntimeError:
            if not self._closed.is_set():
                with suppress(RuntimeError):
                    self._board.gone(rank)
                self._gone.set()

    def _leave(self) -> None:
        self._closed.set()
        self._termination.forget()
        self._remove()

    def _remove(self) -> None:
        """The positions in a temporary folder; and processes that are halted, for which torchrun would wait."""
        living = [seen for seen in map(self._neighbour, self._board.neighbours()) if seen is not None and seen.alive]
        if self._run.folder is None:
            for seen in living:
                if self._last is not None and process_state(seen.pid) == "T":
                    os.kill(seen.pid, signal.SIGKILL)
            position_path(self._folder, self._run.rank).unlink(missing_ok=True)
            if not living:
                shutil.rmtree(self._folder, ignore_errors=True)


def start_watch(watched: Watched) -> Watch:
    """Raises RunError when the store that the processes meet at does not answer."""
    try:
        return Watch(watched)
    except (RuntimeError, KeyError, ValueError) as error:
        raise RunError(f"rank {watched.rank} does not reach the store of torchrun: {described(error)}") from error


def _failure_text(error: BaseException, own: Seen) -> str:
    """What happened to this rank itself."""
    cause = root(error)
    if isinstance(cause, MmplanError) and str(cause).startswith(("rank ", "step ")):
        return str(cause)
    line = f" ({own.line})" if own.line else ""
    said = " ".join(str(cause).split()) if isinstance(cause, MmplanError) else described(cause) + line
    return f"{named(own.rank, own)}, {where(own)}: {said}"
