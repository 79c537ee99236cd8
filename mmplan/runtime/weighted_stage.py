"""What every stage with weights does alike: postponed weight gradients, reductions, updates, counts of what is kept."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from mmplan.runtime.finite import OutputSums, Unsound
from mmplan.runtime.held import Buffer, Place
from mmplan.runtime.host_activations import kept_on_host
from mmplan.runtime.state import StageState
from mmplan.runtime.weight_store import WeightStore


class WeightWatch(Protocol):
    """Sees gradients of weights."""

    def take(self, parameter: Tensor, gradient: Tensor) -> None:
        """One that autograd has not made, of the microbatch that is at work."""

    def before_update(self, state: StageState) -> None:
        """Gradients are summed over the replicas; the update is next."""


class WeightedStage(ABC):
    """The part of a `Stage` that does not depend on how its forward is made.

    Args:
        places: where the stage's parameters lie in the whole model.
        parts: the part of the model whose loss scale the gradient of a parameter carries.
        buffers: what it keeps besides.
        count_kept: count the bytes autograd keeps, by hooks on saved tensors (for devices without an allocator that
            counts). Parameters and the raw batch are left out, a storage that several operators keep counts once.
    """

    def __init__(
        self,
        stage: int,
        state: StageState,
        store: WeightStore,
        places: Mapping[Parameter, Place],
        parts: Mapping[Parameter, str],
        *,
        count_kept: bool,
        buffers: Sequence[Buffer] = (),
    ) -> None:
        self.stage, self.state, self.places, self.buffers = stage, state, places, tuple(buffers)
        self.parts = parts
        self.outputs = OutputSums()
        self.watch: WeightWatch | None = None
        self.ties: dict[int, Callable[[], int]] = {}  # by number, sums over stages; they return bytes (`ties.py`)
        self._tied_bytes = 0
        self._store, self._count_kept = store, count_kept

    @abstractmethod
    def backward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Stage`."""

    def foreseen_bytes(self) -> int | None:
        """See `Stage`."""
        return None

    @abstractmethod
    def losses(self) -> dict[str, float]:
        """See `Stage`."""

    @abstractmethod
    def kept_bytes(self) -> Iterable[int]:
        """What each microbatch in flight keeps for its backward."""

    def backward_input(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with self._store.postponing(microbatch):
            return self.backward(microbatch, received)

    def backward_weight(self, microbatch: int) -> None:
        with torch.no_grad():
            self._store.compute(microbatch, self._accumulate)

    def _accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
        if self.watch is not None:
            self.watch.take(parameter, gradient)
        self.state.accumulate(parameter, gradient)

    def reduce(self) -> None:
        self.state.reduce()

    def tie(self, number: int) -> None:
        self._tied_bytes += self.ties[number]()

    def step(self) -> None:
        if self.watch is not None:
            self.watch.before_update(self.state)
        self.state.step()

    def unsound(self) -> Unsound | None:
        finite = all(math.isfinite(loss) for loss in self.losses().values())
        if finite and all(optimizer.finite() for optimizer in self.state.optimizers):
            return None
        first = self.outputs.first_unsound()
        return Unsound(self.stage, *first) if first is not None else Unsound(self.stage, -1, f"stage {self.stage}")

    def forgo(self) -> None:
        for optimizer in self.state.optimizers:
            optimizer.forgo()

    def poison(self) -> None:
        for optimizer in self.state.optimizers:
            optimizer.poison()

    def moved_bytes(self) -> int:
        return self.state.moved_bytes + self._tied_bytes

    def memory_bytes(self) -> int:
        weights = self.state.addresses()
        postponed = sum(size for address, size in self._store.storages().items() if address not in weights)
        return self.state.memory_bytes() + sum(self.kept_bytes()) + postponed

    @contextmanager
    def counting(self, kept: dict[int, int], given: Iterable[int], *, away: bool = False) -> Iterator[None]:
        """Tensors that autograd saves inside are counted, by address, or where they are to be `away` put into host
        memory; not those at the addresses of what was given."""
        if not self._count_kept and not away:
            yield
            return
        skipped = self.state.addresses() | set(given)
        if away:
            with kept_on_host(skipped):
                yield
            return

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in skipped:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(count, lambda tensor: tensor):
            yield
