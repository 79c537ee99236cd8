"""State of a stage split over its replicas: ZeRO (arXiv 1910.02054, section 5).

Stage 1 shares the optimizer state: gradients are summed at the end of a step, of which each replica gets its share; it
updates that share of the weights, and the weights are gathered. Stages 2 and 3 work layer by layer, in the order of the
layers on every replica, also where a microbatch has nothing for a layer: gradients are summed behind each backward of a
layer, and in stage 3 its weights are gathered before, and given back behind, each forward and backward.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from mmplan.runtime.dtypes import TORCH_DTYPES
from mmplan.runtime.flat import FlatBuffer
from mmplan.runtime.gradients import FlatGradients
from mmplan.runtime.held import Held, Trained, shared_gradients, shared_parameters, whole_parameter
from mmplan.runtime.optimizer import WEIGHT, StageOptimizer
from mmplan.scenario.scenario import Optimizer


class OptimizerShards:
    """ZeRO-1. See `StageState`."""

    compressed: tuple[()] = ()

    def __init__(
        self, layers: Mapping[str, Sequence[Parameter]], optimizer: Optimizer, replicas: dist.ProcessGroup
    ) -> None:
        self.moved_bytes = 0
        self._replicas = replicas
        self._parameters = each_once(layers)
        self._gradients = FlatGradients(self._parameters, TORCH_DTYPES[optimizer.gradient_dtype], replicas.size())
        trained = self._gradients.parameters
        self._weights = [_flattened(trained, replicas.size())] if trained else []  # nothing where all is frozen
        own_gradients = [self._gradients.buffer.share(replicas)] if trained else []
        self._optimizer = StageOptimizer([buffer.share(replicas) for buffer in self._weights], own_gradients, optimizer)
        self.optimizers = (self._optimizer,)

    def enter(self, layer: str, *, backward: bool) -> None:
        pass

    def leave(self, layer: str, *, backward: bool) -> None:
        pass

    def reduce(self) -> None:
        if self._weights:
            self.moved_bytes += self._gradients.buffer.scatter_sum(self._replicas)

    def step(self) -> None:
        self._optimizer.step()
        for buffer in self._weights:
            self.moved_bytes += buffer.gather(buffer.share(self._replicas), self._replicas)
        self._gradients.zero()

    def accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
        self._gradients.accumulate(parameter, gradient)

    def trained(self) -> list[Trained]:
        parameters, buffer = self._gradients.parameters, self._gradients.buffer
        return list(shared_gradients(parameters, buffer, self._replicas, self._optimizer)) if parameters else []

    def summed(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        assert list(parameters) == list(self._gradients.parameters), "what stages share has a buffer of its own"
        return [self._gradients.buffer.share(self._replicas)]

    def addresses(self) -> Set[int]:
        return _storages(self._parameters).keys()

    def memory_bytes(self) -> int:
        weights = sum(_storages(self._parameters).values())
        return weights + self._gradients.buffer.held_bytes + self._optimizer.memory_bytes()

    def held(self) -> list[Held]:
        frozen = [whole_parameter(p) for p in self._parameters if not p.requires_grad]
        trained = zip(self._weights, self._optimizer.state(), strict=True)
        return frozen + [
            held
            for buffer, own in trained
            for held in shared_parameters(self._gradients.parameters, buffer, own, self._replicas)
        ]

    def refresh(self) -> None:
        self._optimizer.publish()
        for buffer in self._weights:
            buffer.gather(buffer.share(self._replicas), self._replicas)

    def weights(self) -> Iterator[Parameter]:
        yield from self._parameters


class LayerShards:
    """ZeRO-2, and with `weights` ZeRO-3. See `StageState`. A matrix that two layers share belongs to the first."""

    compressed: tuple[()] = ()

    def __init__(
        self,
        layers: Mapping[str, Sequence[Parameter]],
        optimizer: Optimizer,
        replicas: dist.ProcessGroup,
        *,
        weights: bool,
    ) -> None:
        self.moved_bytes = 0
        dtype = TORCH_DTYPES[optimizer.gradient_dtype]
        owner = owners_of(layers)
        units = {
            layer: _Unit([p for p in parameters if owner[p] == layer], dtype, replicas, split=weights)
            for layer, parameters in layers.items()
        }
        self._units = tuple(units.values())
        self._used_by = {
            layer: tuple(units[one] for one in dict.fromkeys(owner[p] for p in parameters))
            for layer, parameters in layers.items()
        }
        self._optimizer = StageOptimizer(
            [own for unit in self._units for own in unit.own_weights],
            [own for unit in self._units for own in unit.own_gradients],
            optimizer,
        )
        self.optimizers = (self._optimizer,)

    def enter(self, layer: str, *, backward: bool) -> None:
        for unit in self._used_by[layer]:
            self.moved_bytes += unit.open(backward=backward)

    def leave(self, layer: str, *, backward: bool) -> None:
        for unit in self._used_by[layer]:
            self.moved_bytes += unit.close(backward=backward)

    def reduce(self) -> None:
        """Done behind every backward."""

    def step(self) -> None:
        self._optimizer.step()
        for unit in self._units:
            self.moved_bytes += unit.updated()

    def accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
        raise ValueError("gradients that are sharded cannot wait for a second part of a backward")

    def trained(self) -> list[Trained]:
        with_weights = [unit for unit in self._units if unit.own_weights]
        return [one for index, unit in enumerate(with_weights) for one in unit.trained(self._optimizer, index)]

    def summed(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        (unit,) = (unit for unit in self._units if unit.gradients.parameters)
        assert list(parameters) == list(unit.gradients.parameters), "what stages share has a buffer of its own"
        return unit.own_gradients

    def addresses(self) -> Set[int]:
        return {address for unit in self._units for address in _storages(unit.parameters)}

    def memory_bytes(self) -> int:
        return sum(unit.memory_bytes() for unit in self._units) + self._optimizer.memory_bytes()

    def held(self) -> list[Held]:
        states = iter(self._optimizer.state())
        return [held for unit in self._units for held in unit.held(next(states) if unit.own_weights else {})]

    def refresh(self) -> None:
        self._optimizer.publish()
        for unit in self._units:
            unit.refresh()

    def weights(self) -> Iterator[Parameter]:
        for unit in self._units:
            unit.open(backward=False)
            yield from unit.parameters
            unit.close(backward=False)


class _Unit:
    """The parameters of one layer. Between `close` and `open` only this rank's share of what is split is in memory.

    Args:
        split: weights are split too, frozen ones as well; else gradients only.
    """

    def __init__(
        self, parameters: Sequence[Parameter], dtype: torch.dtype, replicas: dist.ProcessGroup, *, split: bool
    ) -> None:
        self.parameters, self._replicas, self._split = parameters, replicas, split
        self.gradients = FlatGradients(parameters, dtype, replicas.size())
        trained, frozen = self.gradients.parameters, tuple(p for p in parameters if not p.requires_grad)
        flattened = [part for part in (trained, frozen if split else ()) if part]
        self._weights = [_flattened(part, replicas.size()) for part in flattened]
        self._shares = [buffer.share(replicas) for buffer in self._weights]
        if split:
            self._shares = [share.clone() for share in self._shares]
        self.own_weights = self._shares[:1] if trained else []
        self.own_gradients = [self.gradients.buffer.share(replicas).clone()] if trained else []
        self.close(backward=False)
        self.gradients.buffer.release()

    def open(self, *, backward: bool) -> int:
        """Whole weights, and for a backward room for whole gradients; returns the bytes handed to collectives."""
        if backward:
            self.gradients.buffer.restore()
            self.gradients.zero()
        return self._gather() if self._split else 0

    def close(self, *, backward: bool) -> int:
        """Add this rank's share of the summed gradients, and give the rest back; returns the bytes as `open` does."""
        if self._split:
            for buffer in self._weights:
                buffer.release()
        moved_bytes = 0
        if backward:
            for own in self.own_gradients:
                moved_bytes = self.gradients.buffer.scatter_sum(self._replicas)
                own.add_(self.gradients.buffer.share(self._replicas))
            self.gradients.buffer.release()
        return moved_bytes

    def updated(self) -> int:
        """Behind an update of the own weights: gather them where weights are whole; returns the bytes."""
        for own in self.own_gradients:
            own.zero_()
        return self.refresh()

    def refresh(self) -> int:
        """Whole weights follow the own ones; returns the bytes."""
        return 0 if self._split else self._gather()

    def held(self, trained: Mapping[str, Tensor]) -> list[Held]:
        """See `StageState`; `trained`: the optimizer's state of the own weights."""
        parts = [tuple(p for p in self.parameters if p.requires_grad == wanted) for wanted in (True, False)]
        flat = [part for part in (parts if self._split else parts[:1]) if part]
        held = [] if self._split else [whole_parameter(p) for p in parts[1]]
        for part, buffer, share in zip(flat, self._weights, self._shares, strict=True):
            tensors = trained if part is parts[0] else {WEIGHT: share}
            held += shared_parameters(part, buffer, tensors, self._replicas)
        return held

    def trained(self, optimizer: StageOptimizer, index: int) -> Iterator[Trained]:
        """See `StageState`; `index`: of the own weights in the optimizer."""
        return shared_gradients(self.gradients.parameters, self.gradients.buffer, self._replicas, optimizer, index)

    def memory_bytes(self) -> int:
        held_bytes = sum(_storages(self.parameters).values()) + self.gradients.buffer.held_bytes
        shares = self._shares if self._split else []
        return held_bytes + sum(own.nbytes for own in (*shares, *self.own_gradients))

    def _gather(self) -> int:
        moved_bytes = 0
        for buffer, own in zip(self._weights, self._shares, strict=True):
            buffer.restore()
            moved_bytes += buffer.gather(own, self._replicas)
        return moved_bytes


def each_once(layers: Mapping[str, Sequence[Parameter]]) -> tuple[Parameter, ...]:
    """The parameters of all layers, in order; layers may share some."""
    return tuple(dict.fromkeys(parameter for parameters in layers.values() for parameter in parameters))


def owners_of(layers: Mapping[str, Sequence[Parameter]]) -> dict[Parameter, str]:
    """The layer of each parameter; one that two layers share is the first one's."""
    owners: dict[Parameter, str] = {}
    for layer, parameters in layers.items():
        for parameter in parameters:
            owners.setdefault(parameter, layer)
    return owners


def _flattened(parameters: Sequence[Parameter], shares: int) -> FlatBuffer:
    """A buffer of which the parameters are slices from now on."""
    buffer = FlatBuffer(parameters, parameters[0].dtype, shares)
    for parameter, view in zip(parameters, buffer.views, strict=True):
        view.copy_(parameter.data)
        parameter.data = view
    return buffer


def _storages(parameters: Iterable[Parameter]) -> dict[int, int]:
    """Address and bytes of each storage of weights that is in memory."""
    storages = [p.untyped_storage() for p in parameters]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
