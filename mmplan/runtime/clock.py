"""Time stamps of actions, in seconds from a start of the step that all ranks share.

CPU: `perf_counter`. On Linux it is one monotonic clock for all processes of a host, so ranks of one host agree on the
start to the microsecond. On several hosts each rank starts its own clock behind a barrier: they agree to the barrier's
exit skew. CUDA: events on the stream that does the work, behind the same barrier.
"""

import time
from typing import Protocol

import torch
import torch.distributed as dist

from mmplan.units import seconds_of_milliseconds

Mark = object  # what a clock's own `seconds` understands


class Clock(Protocol):
    def start(self) -> None:
        """Wait for all ranks and start the step; collective."""

    def mark(self) -> Mark:
        """Now, on the device that computes."""

    def stop(self) -> None:
        """The step is over: wait until the device has passed all marks."""

    def seconds(self, mark: Mark) -> float:
        """From the start of the step to `mark`, once it is over and until the next one starts."""


class WallClock:
    """Args: control: a gloo group of all ranks; one_host: all of them run on one machine."""

    def __init__(self, control: dist.ProcessGroup, *, one_host: bool) -> None:
        self._control, self._one_host = control, one_host
        self._origin_s = 0.0

    def start(self) -> None:
        dist.barrier(self._control)
        if self._one_host:
            latest = torch.tensor([time.perf_counter()], dtype=torch.float64)
            dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=self._control)
            self._origin_s = float(latest)
        else:
            self._origin_s = time.perf_counter()

    def mark(self) -> Mark:
        return time.perf_counter()

    def stop(self) -> None:
        pass

    def seconds(self, mark: Mark) -> float:
        assert isinstance(mark, float)
        return mark - self._origin_s


class CudaClock:
    """Events on the current stream of the current device, the same ones in every step; the host waits for none of them
    before the end."""

    def __init__(self, control: dist.ProcessGroup) -> None:
        self._control = control
        self._origin = _timing_event()
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def start(self) -> None:
        torch.cuda.synchronize()
        dist.barrier(self._control)
        self._used = 0
        self._origin.record()

    def mark(self) -> Mark:
        if self._used == len(self._events):
            self._events.append(_timing_event())
        event = self._events[self._used]
        event.record()
        self._used += 1
        return event

    def stop(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, mark: Mark) -> float:
        assert isinstance(mark, torch.cuda.Event)
        milliseconds: float = self._origin.elapsed_time(mark)
        return seconds_of_milliseconds(milliseconds)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
