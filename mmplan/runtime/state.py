"""Weights, gradients and optimizer state of a stage, as its replicas, the ranks with the same weights, keep them."""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from mmplan.runtime.compression.sums import CompressedSums, Messages
from mmplan.runtime.dtypes import TORCH_DTYPES
from mmplan.runtime.gradients import FlatGradients
from mmplan.runtime.held import Held, Trained, whole_parameter
from mmplan.runtime.optimizer import StageOptimizer
from mmplan.runtime.shards import LayerShards, OptimizerShards, each_once
from mmplan.scenario.scenario import Optimizer
from mmplan.scenario.technique import Sharding


class StageState(Protocol):
    """All methods but `accumulate`, `addresses`, `memory_bytes` and `held` are collective over the replicas where state
    is sharded; so is going through `weights`.

    Attributes:
        moved_bytes: handed to collectives among the replicas so far.
        optimizers: what updates this rank's part of the weights.
        compressed: sums of messages about gradients.
    """

    @property
    def optimizers(self) -> Sequence[StageOptimizer]: ...

    @property
    def moved_bytes(self) -> int: ...

    @property
    def compressed(self) -> Sequence[CompressedSums]: ...

    def enter(self, layer: str, *, backward: bool) -> None:
        """Before the forward or backward of a layer: its weights are whole from here on."""

    def leave(self, layer: str, *, backward: bool) -> None:
        """Behind it: what is sharded of the layer is so again."""

    def reduce(self) -> None:
        """Sum the gradients of the step over the replicas."""

    def step(self) -> None:
        """Update the weights and forget the gradients."""

    def accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient that autograd has not made."""

    def trained(self) -> list[Trained]:
        """Whose gradients this rank has once they are summed."""

    def summed(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        """What this rank has of the summed gradients of trained parameters that other stages hold too, live and flat;
        where gradients or state are shared out these have a buffer of their own."""

    def addresses(self) -> Set[int]:
        """Of the storages of weights in memory now."""

    def memory_bytes(self) -> int:
        """Weights, gradients and optimizer state in memory now."""

    def held(self) -> list[Held]:
        """All that training goes on from, between two steps."""

    def refresh(self) -> None:
        """What was written into the held tensors reaches the weights that layers compute with."""

    def weights(self) -> Iterator[Parameter]:
        """All parameters, each whole while it is at hand."""


def stage_state(
    layers: Mapping[str, Sequence[Parameter]],
    optimizer: Optimizer,
    sharding: Sharding,
    replicas: dist.ProcessGroup | None,
    messages: Messages | None = None,
) -> StageState:
    """The state of the parameters of layers (by id, in order); whole where there is one replica. `messages`: see
    `WholeState`."""
    if replicas is None or sharding == "none":
        return WholeState(layers, optimizer, replicas, messages)
    if sharding == "optimizer":
        return OptimizerShards(layers, optimizer, replicas)
    return LayerShards(layers, optimizer, replicas, weights=sharding == "parameters")


def by_type(layers: Mapping[str, Sequence[Parameter]]) -> list[dict[str, list[Parameter]]]:
    """Parameters by layer, those of each dtype apart."""
    dtypes = dict.fromkeys(parameter.dtype for own in layers.values() for parameter in own)
    return [{name: [p for p in own if p.dtype == dtype] for name, own in layers.items()} for dtype in dtypes] or [
        {name: [] for name in layers}
    ]


class JointState:
    """Parameters that lie on unlike numbers of ranks: those of experts beside all others. See `StageState`."""

    def __init__(self, parts: Mapping[StageState, Sequence[Parameter]]) -> None:
        """`parts`: each with its parameters."""
        self._parts = tuple(parts)
        self._part_of: dict[Tensor, StageState] = {
            parameter: part for part, parameters in parts.items() for parameter in parameters
        }
        self.optimizers = tuple(optimizer for part in parts for optimizer in part.optimizers)
        self.compressed = tuple(one for part in parts for one in part.compressed)

    @property
    def moved_bytes(self) -> int:
        return sum(part.moved_bytes for part in self._parts)

    def enter(self, layer: str, *, backward: bool) -> None:
        for part in self._parts:
            part.enter(layer, backward=backward)

    def leave(self, layer: str, *, backward: bool) -> None:
        for part in self._parts:
            part.leave(layer, backward=backward)

    def reduce(self) -> None:
        for part in self._parts:
            part.reduce()

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
        self._part_of[parameter].accumulate(parameter, gradient)

    def trained(self) -> list[Trained]:
        return [trained for part in self._parts for trained in part.trained()]

    def summed(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        return self._part_of[parameters[0]].summed(parameters)

    def addresses(self) -> Set[int]:
        return {address for part in self._parts for address in part.addresses()}

    def memory_bytes(self) -> int:
        return sum(part.memory_bytes() for part in self._parts)

    def held(self) -> list[Held]:
        return [held for part in self._parts for held in part.held()]

    def refresh(self) -> None:
        for part in self._parts:
            part.refresh()

    def weights(self) -> Iterator[Parameter]:
        for part in self._parts:
            yield from part.weights()


class WholeState:
    """Every replica has all of it, and gradients are all-reduced at the end of a step, or compressed ones gathered.

    Args:
        messages: which layers' gradients are compressed; None: no one's.
    """

    def __init__(
        self,
        layers: Mapping[str, Sequence[Parameter]],
        optimizer: Optimizer,
        replicas: dist.ProcessGroup | None,
        messages: Messages | None = None,
    ) -> None:
        self.moved_bytes = 0
        self._replicas = replicas
        parameters = each_once(layers)
        self._weights = {p.untyped_storage().data_ptr(): p.nbytes for p in parameters}
        self._gradients = FlatGradients(parameters, TORCH_DTYPES[optimizer.gradient_dtype])
        self._parameters = parameters
        self.compressed: tuple[CompressedSums, ...] = ()
        if messages is not None and replicas is not None:
            self.compressed = (CompressedSums(self._gradients, layers, messages, replicas),)
        self._optimizer = StageOptimizer(self._gradients.parameters, self._gradients.views, optimizer)
        self.optimizers = (self._optimizer,)

    def enter(self, layer: str, *, backward: bool) -> None:
        pass

    def leave(self, layer: str, *, backward: bool) -> None:
        pass

    def reduce(self) -> None:
        for one in self.compressed:
            self.moved_bytes += one.sum()
        if not self.compressed and self._replicas is not None and self._gradients.parameters:
            self.moved_bytes += self._gradients.buffer.sum(self._replicas)

    def step(self) -> None:
        self._optimizer.step()
        self._gradients.zero()

    def accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
        self._gradients.accumulate(parameter, gradient)

    def trained(self) -> list[Trained]:
        return [
            Trained(parameter=parameter, optimizer=self._optimizer, elements=(index, slice(None)))
            for index, parameter in enumerate(self._gradients.parameters)
        ]

    def summed(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        return [self._gradients.view_of(parameter).view(-1) for parameter in parameters]

    def addresses(self) -> Set[int]:
        return self._weights.keys()

    def memory_bytes(self) -> int:
        weights = sum(self._weights.values())
        unsent = sum(one.held_bytes for one in self.compressed)
        return weights + self._gradients.buffer.held_bytes + self._optimizer.memory_bytes() + unsent

    def held(self) -> list[Held]:
        trained = dict(zip(self._gradients.parameters, self._optimizer.state(), strict=True))
        return [whole_parameter(parameter, trained.get(parameter)) for parameter in self._parameters]

    def refresh(self) -> None:
        self._optimizer.publish()

    def weights(self) -> Iterator[Parameter]:
        yield from self._parameters
