"""Runs a forward again as it was: the same arguments, random numbers, modes and buffers, and nothing left behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def in_forward() -> bool:
    """Whether a forward that will be learnt from runs; not one that a backward computes again (checkpointing)."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


class Call:
    """The last forward of a model; holds its arguments, no copies."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self._host = torch.get_rng_state()
        self._device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def run(self, model: nn.Module) -> Any:
        """The output once more; the generators of random numbers and the buffers are as before."""
        devices = [torch.cuda.current_device()] if self._device is not None else []
        with torch.random.fork_rng(devices), _kept_buffers(model):
            torch.set_rng_state(self._host)
            if self._device is not None:
                torch.cuda.set_rng_state(self._device)
            return model(*self.args, **self.kwargs)  # with all hooks: those of FSDP and TP move data


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """Running statistics must not see a batch twice."""
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
