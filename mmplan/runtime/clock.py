"""Time stamps of actions, in seconds from a start of the step that all ranks share.

CPU: `perf_counter`. On Linux it is one monotonic clock for all processes of a host, so ranks of one host agree on the
start to the microsecond. On several hosts each rank starts its own clock behind a barrier: they agree to the barrier's
exit skew. CUDA: events on the compute stream behind the same barrier.
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

    def seconds(self, mark: Mark) -> float:
        """Seconds from the start of the step to `mark`; waits for the device where needed."""


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

    def seconds(self, mark: Mark) -> float:
        assert isinstance(mark, float)
        return mark - self._origin_s


class CudaClock:
    """Events on the current stream of the current device."""

    def __init__(self, control: dist.ProcessGroup) -> None:
        self._control = control
        self._origin = _timing_event()

    def start(self) -> None:
        torch.cuda.synchronize()
        dist.barrier(self._control)
        self._origin = _timing_event()
        self._origin.record()

    def mark(self) -> Mark:
        event = _timing_event()
        event.record()
        return event

    def seconds(self, mark: Mark) -> float:
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()
        milliseconds: float = self._origin.elapsed_time(mark)
        return seconds_of_milliseconds(milliseconds)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
