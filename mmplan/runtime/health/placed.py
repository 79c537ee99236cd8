"""Numbers of tensors that may be distributed: parts, sums of squares and products, whole tensors."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor, detached."""
    part = getattr(tensor, "to_local", None)
    return tensor.detach() if part is None else part().detach()


def whole(tensor: Tensor) -> Tensor:
    """All of a distributed tensor, detached; collective where it is one."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else gather().detach()


def placed_like(part: Tensor, like: Tensor) -> Tensor:
    """This rank's part as a tensor that lies as another does."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(part, mesh, like.placements, shape=like.shape, stride=like.stride())


class Split(NamedTuple):
    """How a DTensor lies: on which mesh, and the axes of that over which it is cut. A plain tensor has no mesh."""

    mesh: Any
    axes: tuple[int, ...]

    def over_ranks(self, number: Tensor) -> Tensor:
        """The sum of a number over the ranks that have the parts, in place; collective."""
        for axis in self.axes:
            dist.all_reduce(number, group=self.mesh.get_group(axis))
        return number


def own_part(tensor: Tensor) -> tuple[Split, Tensor]:
    """How a tensor is cut, and what this rank has of it, detached; sums that are pending are made, which is
    collective."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return Split(None, ()), tensor.detach()
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(tensor, DTensor)
    places = tensor.placements
    if any(place.is_partial() for place in places):
        tensor = tensor.redistribute(mesh, [Replicate() if place.is_partial() else place for place in places])
    cut = tuple(axis for axis, place in enumerate(places) if not (place.is_replicate() or place.is_partial()))
    return Split(mesh, cut), tensor.to_local().detach()


def square_sum(tensors: Iterable[Tensor]) -> Tensor:
    """Sum of squares of all numbers in double precision; those of DTensors are summed over the mesh axes that cut
    them, once for each way of cutting. Collective where there are any."""
    by_split: dict[Split, list[Tensor]] = {}
    for tensor in tensors:
        split, value = own_part(tensor)
        by_split.setdefault(split, []).append(value)
    total = torch.zeros((), dtype=torch.float64)
    for split, values in by_split.items():
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(values)])
        part = split.over_ranks(norms.square().sum())
        total = total.to(part.device) + part
    return total


def inner_product(one: Tensor, other: Tensor) -> float:
    """Of two tensors that lie alike, in double precision; collective where they are DTensors."""
    split, value = own_part(one)
    return float(split.over_ranks((value.double() * own_part(other)[1].double()).sum()))
