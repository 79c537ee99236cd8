"""Gradients of a loss over a large batch whose encoders fit only a few samples at a time (GradCache, arXiv 2101.06983).

Embeddings are made without graph, the loss is differentiated down to them, then each chunk is encoded once more, with
the same random numbers, and its part of the cached gradient is sent through it. The gradients are those of the whole
batch; memory is that of one chunk and of the embeddings.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """An encoder with its batch in chunks.

    Attributes:
        encode: a chunk -> embeddings [samples, ...]; samples must not influence each other (no batch norm).
        without_sync: what postpones the reduction of gradients, DDP's `no_sync`; entered for all chunks but the last.
    """

    encode: Callable[[Any], Tensor]
    chunks: Sequence[Any]
    without_sync: Callable[[], AbstractContextManager[Any]] = nullcontext


def cached_backward(towers: Sequence[Tower], loss: Callable[..., Tensor]) -> Tensor:
    """Add the gradients of `loss(embeddings of each tower)` to the parameters; returns the loss without graph.

    Parameters of the loss itself, a temperature, get theirs too, which DDP does not reduce.

    Raises:
        ValueError: a tower has no chunks.
    """
    if empty := [index for index, tower in enumerate(towers) if not tower.chunks]:
        raise ValueError(f"tower {empty[0]} of {len(towers)} has no chunks")
    states: list[list[_RandomState]] = [[] for _ in towers]
    embeddings, sizes = [], []
    for tower, own_states in zip(towers, states, strict=True):
        parts = []
        with torch.no_grad():
            for chunk in tower.chunks:
                own_states.append(_RandomState.now())
                parts.append(tower.encode(chunk))
        embeddings.append(torch.cat(parts).requires_grad_())
        sizes.append([len(part) for part in parts])
    result = loss(*embeddings)
    result.backward()  # type: ignore[no-untyped-call]
    for tower, own_states, whole, split in zip(towers, states, embeddings, sizes, strict=True):
        if whole.grad is not None:
            _replay(tower, own_states, torch.split(whole.grad, split))
    return result.detach()


def _replay(tower: Tower, states: Sequence["_RandomState"], cached: Sequence[Tensor]) -> None:
    for index, (chunk, state, gradient) in enumerate(zip(tower.chunks, states, cached, strict=True)):
        postponed = index < len(tower.chunks) - 1
        with tower.without_sync() if postponed else nullcontext(), state.again():
            embedding = tower.encode(chunk)
            if embedding.requires_grad:  # a frozen tower has none
                embedding.backward(gradient)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _RandomState:
    """The generators' state before a forward, so that dropout drops the same again."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> "_RandomState":
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(torch.get_rng_state(), tuple(cuda))

    @contextmanager
    def again(self) -> Iterator[None]:
        later = self.now()
        self._set()
        try:
            yield
        finally:
            later._set()

    def _set(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
