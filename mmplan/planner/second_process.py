"""A second process for work that does not wait for what this one does: a search has two cores and is otherwise serial.

The process is forked, so that it begins with all that this one knows, and is asked for values of functions that change
nothing elsewhere. Where there is no second core or no fork (Windows, macOS), and where the process ends before it has
answered, this one works out the value itself: results are the same everywhere, and errors are raised here as they would
be without it. See `docs/decisions/017`.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Generic, TypeVar
from weakref import finalize

Asked = TypeVar("Asked")
Told = TypeVar("Told")
Ours = TypeVar("Ours")

# Halves are even: a process that takes so much longer than this one took for its own is stuck, as a forked one may be
# in a lock that another thread held.
LEAST_PATIENCE_S = 20.0
SLOWER = 4.0

logger = logging.getLogger(__name__)


def two_cores() -> bool:
    """Whether a forked process could run beside this one."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


class Second(Generic[Asked, Told]):
    """Answers questions one after the other, in a process of its own until it is closed or forgotten.

    Args:
        answer: a function of the question and of what is known when this object is made.
        worth: False: the questions are too small for a process.
    """

    def __init__(self, answer: Callable[[Asked], Told], *, worth: bool = True) -> None:
        self._answer = answer
        self._asked: list[Asked] = []
        self._asked_s = 0.0
        self._pipe: Connection | None = None
        self._end: Callable[[], object] = lambda: None
        if worth and two_cores():
            self._fork()

    def ask(self, question: Asked) -> None:
        """Begin with a question; what came before has to be answered first."""
        if self._asked:  # an interrupt came before the answer, which would be taken for this one's
            self.close()
        self._asked, self._asked_s = [question], perf_counter()
        if self._pipe is not None:
            try:
                self._pipe.send(question)
            except OSError:
                self._lost()

    def told(self) -> Told:
        """The answer; waits for it."""
        (question,) = self._asked
        told: tuple[Told] | None = None
        if self._pipe is not None:
            patience_s = LEAST_PATIENCE_S + SLOWER * (perf_counter() - self._asked_s)
            try:
                if self._pipe.poll(patience_s):
                    told = self._pipe.recv()
                else:
                    self._lost()
            except (EOFError, OSError):
                self._lost()
        found = self._answer(question) if told is None else told[0]
        self._asked = []
        return found

    def close(self) -> None:
        """End the process; questions are answered here from now on."""
        self._end()
        self._pipe, self._asked = None, []

    def _lost(self) -> None:
        logger.warning("the second process of the search ended early or is stuck; this one does its part")
        asked = self._asked
        self.close()
        self._asked = asked

    def _fork(self) -> None:
        ours, theirs = Pipe()
        child = os.fork()
        if child == 0:
            ours.close()
            _serve(theirs, self._answer)
        theirs.close()
        self._pipe = ours
        self._end = finalize(self, _end, ours, child)


def both(ours: Callable[[], Ours], theirs: Callable[[], Told], *, worth: bool = True) -> tuple[Ours, Told]:
    """The values of two functions, the second one's from another process where that can be."""
    second = Second[None, Told](lambda _: theirs(), worth=worth)
    try:
        second.ask(None)
        return ours(), second.told()
    finally:
        second.close()


def _serve(pipe: Connection, answer: Callable[[Asked], Told]) -> None:
    """Answer until nobody asks; never returns, as what stands above in the stack is the other process's."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks, which then ends this one
        gc.freeze()  # or looking for garbage copies all that both processes share
        while True:
            question = pipe.recv()
            try:
                told = (answer(question),)
            except Exception:  # the process that asks does the same, and raises the same
                pipe.send(None)
            else:
                pipe.send(told)
    finally:
        os._exit(0)


def _end(pipe: Connection, child: int) -> None:
    pipe.close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
