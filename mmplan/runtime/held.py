"""What a rank keeps of a parameter between two steps: its weights and moments, as boxes of the parameter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from mmplan.runtime.checkpoint.boxes import Box, whole
from mmplan.runtime.flat import FlatBuffer
from mmplan.runtime.optimizer import WEIGHT, Elements, StageOptimizer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Held:
    """A box of a parameter that this rank keeps up to date: the live tensors of its shape, by kind.

    `copied`: all replicas keep the same.
    """

    parameter: Parameter
    box: Box
    tensors: Mapping[str, Tensor]
    copied: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trained:
    """Elements of a parameter whose summed gradient this rank has, and what updates them."""

    parameter: Parameter
    optimizer: StageOptimizer
    elements: Elements


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank's parameter lies in that of the whole model: its name and shape there, and the first element.

    What lies beyond the end is padding, which is zero and stays so. `writes`: whether this rank writes to checkpoints
    what others hold as well; None: it takes turns with its replicas.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    writes: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Buffer:
    """What a model keeps beside its parameters and saves with them, whole and live on every rank: running means,
    biases that no gradient moves. `writes`: whether this rank writes it to checkpoints."""

    name: str
    tensor: Tensor
    writes: bool


def whole_place(name: str, parameter: Parameter) -> Place:
    """Of a parameter that the rank has whole."""
    return Place(name=name, shape=tuple(parameter.shape), offset=(0,) * parameter.dim())


def whole_parameter(parameter: Parameter, trained: Mapping[str, Tensor] | None = None) -> Held:
    """One that every replica has whole; `trained`: the optimizer's state, None where it is frozen."""
    tensors = trained or {WEIGHT: parameter.detach()}
    return Held(parameter=parameter, box=whole(parameter.shape), tensors=tensors, copied=True)


def shared_parameters(
    parameters: Sequence[Parameter], buffer: FlatBuffer, share: Mapping[str, Tensor], replicas: dist.ProcessGroup
) -> Iterator[Held]:
    """The boxes in this rank's share of a buffer of the parameters; `share`: flat tensors of its length, by kind."""
    for index, box, place in buffer.shared(replicas):
        tensors = {kind: tensor[place].view(box.shape) for kind, tensor in share.items()}
        yield Held(parameter=parameters[index], box=box, tensors=tensors, copied=False)


def shared_gradients(
    parameters: Sequence[Parameter],
    buffer: FlatBuffer,
    replicas: dist.ProcessGroup,
    optimizer: StageOptimizer,
    weight: int = 0,
) -> Iterator[Trained]:
    """What is in this rank's share of a buffer of the parameters: the optimizer's weight of that index."""
    for index, _, place in buffer.shared(replicas):
        yield Trained(parameter=parameters[index], optimizer=optimizer, elements=(weight, place))
