"""A request to end (SIGTERM) that a thread hears, also while the main thread is inside a library that waits."""

import os
import select
import signal
import socket
import threading
from types import FrameType
from typing import Any


class Termination:
    """Hears the requests to this process from now on; only the main thread may start that."""

    def __init__(self) -> None:
        self._write, self._read = socket.socketpair()
        self._write.setblocking(False)
        self._process = os.getpid()
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._handle)
            signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)  # written to at once, unlike handlers

    def came(self, wait_s: float) -> bool:
        """Whether one came, or comes within `wait_s`."""
        readable, _, _ = select.select([self._read], [], [], wait_s)
        return bool(readable) and signal.SIGTERM in self._read.recv(64)

    def forget(self) -> None:
        """As before; called by the main thread."""
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self._before)

    def obey(self) -> None:
        os._exit(128 + signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked helper of the user's: it shall end as ever
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
