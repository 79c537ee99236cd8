"""What a rank keeps of a parameter between two steps: its weights and moments, as boxes of the parameter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
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

    What lies beyond the end, or beyond `limit` where that comes before, is padding, which is zero and stays so.
    `writes`: whether this rank writes to checkpoints what others hold as well; None: it takes turns with its replicas.
    `cut`: where the rank has a part of each of some sections of equal size (queries, keys and values in one matrix).
    `repeated`: another rank that shares the layer has all the same of it, and writes it; `sharers`: so many have where
    some of those that share the layer do. `copies`: stages that hold it.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    limit: tuple[int, ...] | None = None
    writes: bool | None = None
    cut: "Cut | None" = None
    repeated: bool = False
    sharers: int = 1
    copies: int = 1

    def boxes(self, own: Box) -> Iterator[tuple[Box, tuple[slice, ...]]]:
        """The boxes of the whole parameter that a box of the rank's is, and where each lies in it."""
        if self.cut is None:
            moved = own.moved(self.offset)
            box = moved.common(whole(self.limit or self.shape))
            if box is not None:  # else nothing but padding
                yield box, box.within(moved)
            return
        dim, sections = self.cut.dim, self.cut.sections
        size, part = self.shape[dim] // sections, self.shape[dim] // sections // self.cut.degree
        for section in range(sections):
            first = tuple(section * part if d == dim else 0 for d in range(len(self.shape)))
            inside = tuple(part if d == dim else length for d, length in enumerate(self.shape))
            common = own.common(Box(first, inside))
            if common is not None:
                by = [a + (section * (size - part) if d == dim else 0) for d, a in enumerate(self.offset)]
                yield common.moved(by), common.within(own)


@dataclass(frozen=True, slots=True)
class Cut:
    """A parameter of whose `sections` along a dimension each of `degree` ranks has an equal part."""

    dim: int
    sections: int
    degree: int

    def own(self, tensor: Tensor, index: int) -> Tensor:
        """The part of the rank `index`."""
        sections = tensor.chunk(self.sections, self.dim)
        return torch.cat([section.chunk(self.degree, self.dim)[index] for section in sections], self.dim)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole of the parts of all ranks."""
        by_rank = [part.chunk(self.sections, self.dim) for part in parts]
        return torch.cat([section for sections in zip(*by_rank, strict=True) for section in sections], self.dim)

    def place(self, name: str, own: Parameter, index: int) -> Place:
        """Where the part of the rank `index` lies."""
        length = own.shape[self.dim] * self.degree
        shape = tuple(length if dim == self.dim else size for dim, size in enumerate(own.shape))
        first = length // self.sections // self.degree * index
        offset = tuple(first if dim == self.dim else 0 for dim in range(own.dim()))
        return Place(name=name, shape=shape, offset=offset, cut=self)


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
