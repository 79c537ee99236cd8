"""Where communication of a rank runs beside its compute: on CUDA receives, sends and sums have a stream each.

A library posts a transfer behind what the current stream has to do. On a stream of its own a receive does not wait for
the computes that were launched before it, nor does a compute wait for the sums of another stage; streams wait for each
other where one reads what the other has written, and the host for none of them. Memory that was allocated on one stream
and is used on another is recorded there, so that nobody else gets it before.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor


class Streams(Protocol):
    def receiving(self) -> AbstractContextManager[None]:
        """Room is made, and receives are posted here."""

    def sending(self, tensor: Tensor) -> AbstractContextManager[None]:
        """A tensor is sent from here, behind what has been computed so far."""

    def summing(self) -> AbstractContextManager[None]:
        """Gradients are summed here, behind what has been computed so far."""

    def taken(self, received: Tensor) -> None:
        """Compute, which has waited for it, reads what was received."""

    def summed(self) -> None:
        """Compute goes on behind all sums."""


class OneStream:
    """Everything in the order of the program."""

    def receiving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sending(self, tensor: Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def summing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def taken(self, received: Tensor) -> None:
        pass

    def summed(self) -> None:
        pass


class CudaStreams:
    """Compute is on the current stream of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._receives, self._sends, self._sums = (_stream(device) for _ in range(3))

    def receiving(self) -> AbstractContextManager[None]:
        return _on(self._receives)

    @contextmanager
    def sending(self, tensor: Tensor) -> Iterator[None]:
        self._sends.wait_stream(torch.cuda.current_stream(self._device))
        tensor.record_stream(self._sends)
        with _on(self._sends):
            yield

    @contextmanager
    def summing(self) -> Iterator[None]:
        self._sums.wait_stream(torch.cuda.current_stream(self._device))
        with _on(self._sums):
            yield

    def taken(self, received: Tensor) -> None:
        if received.is_cuda:  # what came through host memory has been copied
            received.record_stream(torch.cuda.current_stream(self._device))

    def summed(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._sums)


@lru_cache(maxsize=4)
def streams_of(device: torch.device) -> Streams:
    """The same in every step."""
    return CudaStreams(device) if device.type == "cuda" else OneStream()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _on(stream: torch.cuda.Stream) -> AbstractContextManager[None]:
    return torch.cuda.stream(stream)
